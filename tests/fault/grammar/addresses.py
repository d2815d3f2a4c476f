# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""Addresses, routes and names of nodes that lead elsewhere."""

from __future__ import annotations

from tests.fault.grammar.fault import ALL, NODES, Collection, address_of


def add(made: Collection) -> None:
    for at in ("lo", "eth0"):
        one, other = made.two()
        made.add(f"address: that of another node on {at}", "addresses", "duplicate-address", sorted([one, other]), r"ip addr del",
             (one, f"ip addr add {address_of(other)}/32 dev {at}"))  # fmt: skip
    one, other = made.two()
    made.add("address: the same on two nodes, on an interface that is down", "addresses", "duplicate-address", sorted([one, other]), r"ip addr del",
         (one, f"ip link add x0 type veth peer name x1; ip addr add {address_of(other)}/32 dev x0"))  # fmt: skip
    for index in range(2):
        one, other = made.two()
        do = f"(: >/dev/tcp/{address_of(other)}/22); m=$(ip neigh show {address_of(other)} | sed 's/.*lladdr \\([^ ]*\\).*/\\1/'); ip link set eth0 down; ip link set eth0 address $m; ip link set eth0 up"
        made.add(
            f"address: the MAC of another node, {index}",
            "addresses",
            "duplicate-mac reach",
            sorted([one, other]),
            r"MAC|ip link set .* address|hwaddr",
            (one, do),
        )
    for kind in ("blackhole", "unreachable", "prohibit"):
        one, other = made.two()
        made.add(
            f"route: {kind} to one peer",
            "addresses",
            "data-ports",
            [one, other],
            r"ip route",
            (one, f"ip route add {kind} {address_of(other)}/32"),
            pair=True,
        )
    one, other = made.two()
    made.add("route: to one peer by an interface without a cable", "addresses", "data-ports", [one, other], r"ip route",
         (one, f"ip link add x0 type veth peer name x1; ip link set x0 up; ip link set x1 up; ip addr add 192.168.77.1/24 dev x0; ip route add {address_of(other)}/32 dev x0"), pair=True)  # fmt: skip
    for index in range(2):
        one, other = made.two()
        made.add(f"neighbour: a wrong MAC for one peer, {index}", "addresses", "data-ports", [one, other], r"ip neigh|arp",
             (one, f"ip neigh replace {address_of(other)} lladdr 02:00:00:00:00:99 dev eth0 nud permanent"), pair=True)  # fmt: skip
    for index in range(2):
        node = made.host()
        made.add(f"nat: source address translated on the way out, {index}", "addresses", "nat", [node], r"nat|masquerade|network host",
             (node, 'x=${HERE%.*}.240; ip addr add $x/24 dev eth0; iptables -t nat -A POSTROUTING -o eth0 -p tcp ! --sport 22 -j SNAT --to $x'))  # fmt: skip
    name_fix = r"/etc/hosts"
    for address in ("127.0.1.1", "127.0.0.1"):
        node = made.host()
        made.add(f"names: its own name is {address}", "names", "loopback-name", [node], name_fix,
             (node, f"hosts 's/^[0-9].* {node}$/{address} {node}/'"), fatal=False)  # fmt: skip
    for index in range(2):
        one, other = made.two()
        made.add(f"names: another node's name means a third address, {index}", "names", "names", [one], name_fix,
             (one, f"hosts 's/^[0-9].* {other}$/10.255.255.7 {other}/'"), fatal=False)  # fmt: skip
    one, other = made.two()
    made.add("names: its own name means another node", "names", "names", [one], name_fix,
         (one, f"hosts \"s/^[0-9].* {one}$/{address_of(other)} {one}/\""), fatal=False)  # fmt: skip
    node = made.host()
    made.add("names: localhost is a foreign address", "names", "names localhost", [node], r"/etc/hosts.*127\.0\.0\.1|127\.0\.0\.1.*/etc/hosts",
         (node, "hosts 's/^127.0.0.1 localhost/10.255.255.8 localhost/'"))  # fmt: skip
    node = made.host()
    made.add(
        "names: no localhost",
        "names",
        "names localhost",
        [node],
        r"/etc/hosts",
        (node, "hosts '/localhost/d'"),
        fatal=False,
    )
    for index in range(2):
        one, other = made.two()
        made.add(f"names: the host name of another node, {index}", "names", "duplicate-hostname", sorted([one, other]), r"hostnamectl|hostname",
             (one, f"hostname {other}"), fatal=False)  # fmt: skip
    made.add("names: all are called localhost", "names", "duplicate-hostname loopback-name", ALL, r"hostnamectl|hostname",
         *((node, "hostname localhost") for node in NODES), fatal=False)  # fmt: skip
