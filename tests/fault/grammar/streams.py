# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""Connections that stall, break, lose, repeat or delay: by size, rate, place and direction."""

from __future__ import annotations

from tests.fault.grammar.fault import NODES, Collection, address_of


def add(made: Collection) -> None:
    counted = "-m connbytes --connbytes {}: --connbytes-dir {} --connbytes-mode bytes"
    cause = r"firewall|conntrack|middlebox|inspection|iptables|nft|offload"
    for size, words in ((1_500_000, "1.5 MB"), (8_000_000, "8 MB"), (30_000_000, "30 MB")):
        node = made.host()
        rule = f"iptables -A INPUT -i eth0 -p tcp ! --dport 22 {counted.format(size, 'original')} -j DROP"
        made.add(f"stream: stalls after {words}, into one node", "streams", "stream", [node], cause, (node, rule))
        one, other = made.two()
        rule = (
            f"iptables -A OUTPUT -p tcp ! --sport 22 -d {address_of(other)} {counted.format(size, 'original')} -j DROP"
        )
        made.add(
            f"stream: stalls after {words}, out to one peer",
            "streams",
            "stream",
            [one, other],
            cause,
            (one, rule),
            pair=True,
        )
        node = made.host()
        rule = f"iptables -A INPUT -i eth0 -p tcp ! --dport 22 ! --sport 22 {counted.format(size, 'both')} -j REJECT --reject-with tcp-reset"
        made.add(f"stream: reset after {words}, one node", "streams", "stream", [node], cause, (node, rule))
        one, other = made.two()
        rule = f"iptables -A INPUT -s {address_of(other)} -p tcp ! --dport 22 {counted.format(size, 'original')} -j REJECT --reject-with tcp-reset"
        made.add(
            f"stream: reset after {words}, from one peer",
            "streams",
            "stream",
            [one, other],
            cause,
            (one, rule),
            pair=True,
        )
    for size in (1200, 600):
        for chain, flag in (("INPUT", "-s"), ("OUTPUT", "-d")):
            node = made.host()
            which = "-i eth0" if chain == "INPUT" else "-o eth0"
            rule = f"iptables -A {chain} {which} -p tcp ! --dport 22 -m length --length {size}:65535 -j DROP"
            if chain == "OUTPUT":
                rule = f"iptables -A OUTPUT -o eth0 -p tcp ! --sport 22 -m length --length {size}:65535 -j DROP"
            made.add(
                f"large packets: above {size}, {chain.lower()}, all",
                "streams",
                "large-packets",
                [node],
                r"mtu",
                (node, rule),
            )
            one, other = made.two()
            rule = f"iptables -A {chain} {flag} {address_of(other)} -m length --length {size}:65535 -j DROP"
            made.add(f"large packets: above {size}, {chain.lower()}, one peer", "streams", "large-packets", [one, other], r"mtu",
                 (one, rule), pair=True)  # fmt: skip
    jumbo = "ip link set eth0 mtu 4000"
    one, other = made.two()
    made.add("large packets: jumbo frames on two nodes, switch without", "streams", "large-packets mtu", [one, other], r"mtu",
         (one, jumbo), (other, jumbo), pair=True)  # fmt: skip
    for size in (1400, 1280, 9000):
        node = made.host()
        made.add(
            f"mtu: {size} on one node",
            "streams",
            "mtu",
            [node],
            rf"mtu 1500.*{node}|{node}.*mtu 1500",
            (node, f"ip link set eth0 mtu {size}"),
            fatal=False,
        )
    for share in (1, 4, 15):
        probability = f"-m statistic --mode random --probability {share / 100}"
        cable = r"ethtool|ip -s link|cable"
        node = made.host()
        made.add(f"loss: {share}% into one node", "streams", "packet-loss", [node], cable,
             (node, f"iptables -A INPUT -i eth0 {probability} -j DROP"), fatal=False)  # fmt: skip
        node = made.host()
        made.add(f"loss: {share}% out of one node", "streams", "packet-loss", [node], cable,
             (node, f"iptables -A OUTPUT -o eth0 {probability} -j DROP"), fatal=False)  # fmt: skip
        one, other = made.two()
        made.add(f"loss: {share}% from one peer", "streams", "packet-loss", [one, other], cable,
             (one, f"iptables -A INPUT -s {address_of(other)} {probability} -j DROP"), pair=True, fatal=False)  # fmt: skip
    for rate in ("5mbit", "30mbit", "150mbit", "600mbit"):
        size = max(65_536, int(rate[:-4]) * 1000)
        shape = f"tc qdisc replace dev eth0 root tbf rate {rate} burst {size} latency 100ms"
        speed = r"ethtool|tc qdisc"
        node = made.host()
        made.add(f"slow: {rate} out of one node", "streams", "bandwidth", [node], speed, (node, shape), fatal=False)
        one, other = made.two()
        towards = (
            "tc qdisc replace dev eth0 root handle 1: htb; "
            f"tc class replace dev eth0 parent 1: classid 1:1 htb rate {rate}; "
            f"tc filter add dev eth0 parent 1: protocol ip u32 match ip dst {address_of(other)}/32 flowid 1:1"
        )
        made.add(
            f"slow: {rate} to one peer",
            "streams",
            "bandwidth",
            [one, other],
            speed,
            (one, towards),
            pair=True,
            fatal=False,
        )
    for rate in ("20mb", "2mb"):
        node = made.host()
        made.add(f"slow: a policer drops above {rate}/s into one node", "streams", "bandwidth packet-loss", [node], r"ethtool|tc |polic",
             (node, f"iptables -A INPUT -i eth0 -p tcp ! --dport 22 -m hashlimit --hashlimit-name x --hashlimit-above {rate}/s --hashlimit-burst 2500kb -j DROP"),
             fatal=False)  # fmt: skip
    one, other = made.two()
    made.add("duplicates: every packet to one peer twice", "streams", "duplicate-packets packet-loss", [one, other], r"bond|loop|spanning|mirror|switch",
         (one, f"iptables -t mangle -A POSTROUTING -o eth0 -d {address_of(other)} -j TEE --gateway {address_of(other)}"), pair=True, fatal=False)  # fmt: skip
    node = made.host()
    rules = "; ".join(
        f"iptables -t mangle -A POSTROUTING -o eth0 -d {address_of(one)} -j TEE --gateway {address_of(one)}"
        for one in NODES
        if one != node
    )
    made.add("duplicates: every packet out of one node twice", "streams", "duplicate-packets packet-loss", [node], r"bond|loop|spanning|mirror|switch",
         (node, rules), fatal=False)  # fmt: skip
