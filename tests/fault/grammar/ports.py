# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""Ports that a firewall, another program or a short range keeps from the workers."""

from __future__ import annotations

from tests.fault.grammar.fault import Collection, address_of


def add(made: Collection) -> None:
    verdicts = {
        "dropped": "DROP",
        "reset": "REJECT --reject-with tcp-reset",
        "prohibited": "REJECT --reject-with icmp-admin-prohibited",
    }
    for word, verdict in verdicts.items():
        for chain, way, opposite in (("INPUT", "inbound", "-s"), ("OUTPUT", "outbound", "-d")):
            fix = r"\bin\b.*from|inbound|INPUT" if chain == "INPUT" else r"\bout\b|outbound|OUTPUT"
            node = made.host()
            rule = f"iptables -A {chain} -p tcp --syn --dport 32768:60999 -j {verdict}"
            made.add(f"ports: {way} {word}, all", "ports", "data-ports", [node], fix, (node, rule))
            one, other = made.two()
            rule = f"iptables -A {chain} -p tcp --syn {opposite} {address_of(other)} --dport 32768:60999 -j {verdict}"
            made.add(f"ports: {way} {word}, one peer", "ports", "data-ports", [one, other], fix, (one, rule), pair=True)
    port = {"network.rendezvous_port": 29555}
    for word, verdict in verdicts.items():
        rule = f"iptables -A INPUT -p tcp --syn --dport 29555 -j {verdict}"
        fix = r"29555.*\bin\b|inbound|INPUT"
        made.add(f"rendezvous: {word}, all", "ports", "rendezvous-port", ["node1"], fix, ("node1", rule), spec=port)
    for node in ("node2", "node3"):
        rule = f"iptables -A INPUT -p tcp --syn -s {address_of(node)} --dport 29555 -j DROP"
        made.add(f"rendezvous: dropped from {node}", "ports", "rendezvous-port", ["node1", node], "29555",
             ("node1", rule), pair=True, spec=port)  # fmt: skip
        rule = "iptables -A OUTPUT -p tcp --syn --dport 29555 -j DROP"
        made.add(f"rendezvous: outbound dropped on {node}", "ports", "rendezvous-port", ["node1", node], r"29555.*\bout\b|outbound|OUTPUT",
             (node, rule), pair=True, spec=port)  # fmt: skip
    hold = '$PY -c "import socket,time; s=socket.socket({}); s.setsockopt(1,2,1); s.bind(({},29555)); s.listen(); time.sleep(600)" >/dev/null 2>&1 </dev/null & sleep 1'
    for word, family, at in (
        ("everywhere", "", "''"),
        ("at its address", "", "'$P1'"),
        ("for both families", "socket.AF_INET6", "'::'"),
    ):
        made.add(f"rendezvous: taken {word}", "ports", "rendezvous-port", ["node1"], r"ss -|lsof|auto|another port",
             ("node1", hold.format(family, at)), spec=port)  # fmt: skip
    for way, opposite in (("INPUT", "-s"), ("OUTPUT", "-d")):
        one, other = made.two()
        made.add(f"ports: nothing passes, {way.lower()}", "ports", "data-ports", [one, other], r"iptables|nft|firewall|security",
             (one, f"iptables -A {way} {opposite} {address_of(other)} -j DROP"), pair=True)  # fmt: skip
    for most in (1, 2):
        node = made.host()
        made.add(f"ports: at most {most} connections a peer", "ports", "data-ports stream", [node], r"iptables|nft|firewall|connlimit",
             (node, f"iptables -A INPUT -i eth0 -p tcp --syn ! --dport 22 -m connlimit --connlimit-above {most} -j REJECT --reject-with tcp-reset"))  # fmt: skip
    for first, last in ((60000, 60010), (61000, 61002), (32768, 32771)):
        node = made.host()
        made.add(f"ephemeral ports: {first}-{last}", "ports", "ephemeral-ports", [node], r"sysctl.*ip_local_port_range",
             (node, f"echo '{first} {last}' >/proc/sys/net/ipv4/ip_local_port_range"))  # fmt: skip
