# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""Second collection: rules for a part of the ports, by number, by source, by translation."""

from __future__ import annotations

from tests.fault.grammar.fault import Collection, address_of

_FIREWALL = r"iptables|nft|firewall"


def add(made: Collection) -> None:
    verdicts = {"dropped": "DROP", "reset": "REJECT --reject-with tcp-reset"}
    for word, verdict in verdicts.items():
        for chain, way, opposite in (("INPUT", "inbound", "-s"), ("OUTPUT", "outbound", "-d")):
            node = made.host()
            rule = f"iptables -A {chain} -p tcp --syn --dport 40000:48000 -j {verdict}"
            made.add(f"some ports: {way} {word}, all", "some ports", "data-ports", [node], _FIREWALL, (node, rule))
            one, other = made.two()
            rule = f"iptables -A {chain} -p tcp --syn {opposite} {address_of(other)} --dport 50000:58000 -j {verdict}"
            made.add(
                f"some ports: {way} {word}, one peer",
                "some ports",
                "data-ports",
                [one, other],
                _FIREWALL,
                (one, rule),
                pair=True,
            )
    for word, verdict in verdicts.items():
        rule = f"iptables -A INPUT -p tcp --syn --dport 23000:28000 -j {verdict}"
        made.add(
            f"meeting ports: some {word} on the head node",
            "some ports",
            "rendezvous-port",
            ["node1"],
            _FIREWALL,
            ("node1", rule),
        )
        rule = f"iptables -A INPUT -p tcp --syn -s $P3 --dport 23000:28000 -j {verdict}"
        made.add(
            f"meeting ports: some {word} from one peer",
            "some ports",
            "rendezvous-port",
            ["node1", "node3"],
            _FIREWALL,
            ("node1", rule),
            pair=True,
        )
    for node, (word, verdict) in zip(("node2", "node3"), verdicts.items(), strict=True):
        rule = f"iptables -A INPUT -p tcp --syn --dport 20000:32767 -j {verdict}"
        made.add(
            f"meeting ports: all {word} on a node that is not the head",
            "some ports",
            "rendezvous-port",
            [node],
            _FIREWALL,
            (node, rule),
            fatal=False,
        )
    node = made.host()
    made.add("some ports: those that come from the lower half dropped", "some ports", "data-ports", [node], _FIREWALL,
             (node, "iptables -A INPUT -i eth0 -p tcp --syn ! --dport 22 --sport 32768:46000 -j DROP"))  # fmt: skip
    node = made.host()
    made.add("some ports: redirected to one where nobody listens", "some ports", "data-ports", [node], r"nat|iptables|nft",
             (node, "iptables -t nat -A PREROUTING -i eth0 -p tcp --dport 40000:50000 -j REDIRECT --to-ports 9"))  # fmt: skip
    one, other = made.two()
    made.add("some ports: translated to another node", "some ports", "data-ports duplicate-address", [one], r"nat|iptables|nft",
             (one, f"echo 1 >/proc/sys/net/ipv4/ip_forward; iptables -t nat -A PREROUTING -i eth0 -p tcp --dport 40000:50000 -j DNAT --to {address_of(other)}"))  # fmt: skip
    node = made.host()
    made.add("handshakes: answers to its calls are dropped", "some ports", "data-ports", [node], _FIREWALL,
             (node, "iptables -A INPUT -i eth0 -p tcp --tcp-flags SYN,ACK SYN,ACK ! --sport 22 -j DROP"))  # fmt: skip
    one, other = made.two()
    made.add("handshakes: answers of one peer are dropped", "some ports", "data-ports", [one, other], _FIREWALL,
             (one, f"iptables -A INPUT -s {address_of(other)} -p tcp --tcp-flags SYN,ACK SYN,ACK -j DROP"), pair=True)  # fmt: skip
