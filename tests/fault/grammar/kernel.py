# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""Second collection: settings of the kernel, policy routing, and filters that lose some of what they see."""

from __future__ import annotations

from tests.fault.grammar.fault import Collection, address_of

_LINK = r"ethtool|tc |ip -s link|sysctl|tcp_|route|cable"


def add(made: Collection) -> None:
    for name in ("rmem", "wmem"):
        node = made.host()
        made.add(f"kernel: tcp_{name} of 4 KiB", "kernel", "bandwidth", [node], _LINK,
                 (node, f"echo '4096 4096 4096' >/proc/sys/net/ipv4/tcp_{name}"), fatal=False)  # fmt: skip
    one, other = made.two()
    made.add("kernel: a rule of the routing policy swallows one peer", "kernel", "data-ports", [one, other], r"ip rule|ip route",
             (one, f"ip rule add pref 50 to {address_of(other)}/32 blackhole"), pair=True)  # fmt: skip
    one, other = made.two()
    made.add("kernel: a rule of the routing policy prohibits one peer", "kernel", "data-ports", [one, other], r"ip rule|ip route",
             (one, f"ip rule add pref 50 to {address_of(other)}/32 prohibit"), pair=True)  # fmt: skip
    node = made.host()
    made.add("kernel: the loopback interface has no 127.0.0.1", "kernel", "names interface data-ports loopback-name", [node], r"127\.0\.0\.1|\blo\b",
             (node, "ip addr del 127.0.0.1/8 dev lo"), fatal=False)  # fmt: skip
    filters = (
        ("every 30th packet is lost, into one node", "INPUT -i eth0 -m statistic --mode nth --every 30 -j DROP", "packet-loss", False),
        ("a tenth of small packets is lost, out of one node", "OUTPUT -o eth0 -m length --length 0:200 -m statistic --mode random --probability 0.1 -j DROP",
         "packet-loss", False),
        ("few new connections a second", "INPUT -i eth0 -p tcp --syn ! --dport 22 -m hashlimit --hashlimit-name new --hashlimit-above 3/sec "
         "--hashlimit-burst 3 -j DROP", "data-ports", True),
    )  # fmt: skip
    for word, rule, checks, fatal in filters:
        node = made.host()
        made.add(
            f"filter: {word}",
            "filters",
            checks,
            [node],
            _LINK + "|iptables|nft|firewall",
            (node, f"iptables -A {rule}"),
            fatal=fatal,
        )
