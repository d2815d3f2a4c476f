"""Checks between nodes: names, addresses, interfaces, and every ordered pair of nodes. Pure."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dtctl import node_facts
from dtctl.doctor.checks import links
from dtctl.doctor.findings import Finding, choose_covering_nodes, find_odd_nodes
from dtctl.doctor.node_report import MEETING, REACHED, NodeReport
from dtctl.doctor.planned_addresses import find_route_interface, is_loopback

RAN = ("duplicate-mac", "duplicate-address", "duplicate-hostname", "loopback-name", "names", "ephemeral-ports",
       "neighbour-table", "data-ports", "rendezvous-port", "large-packets", "nat", "mtu")  # fmt: skip
FEW_PORTS = 256
SCARCE_PORTS = 2048
"""With fewer ports than the first limit, a job on some nodes runs out of them: every connection takes a port, and keeps
it for a minute after its end."""
NO_ROOM = "no-room"
"""Result of a call that the kernel of the calling node has dropped."""
_WORDS = {
    "dropped": "are dropped silently",
    "refused": "are rejected (the port is open on the node, but a device on the way rejects them)",
    "unreachable": "are answered with `unreachable`",
    "silent": "are accepted, but never answered",
    "error": "fail",
}


def check_host_names(reports: Sequence[NodeReport], wanted: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield findings about host names that resolve to a loopback address, or differently on the nodes.

    Args:
        reports: the nodes.
        wanted: further names that all nodes have looked up and must resolve alike.
    """
    yield from _check_own_names(reports)
    yield from _same_names(reports)
    yield from _check_localhost(reports)
    yield from _check_shared_names(reports, wanted)


def _check_own_names(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield a finding about nodes whose own host name is a loopback address for themselves."""
    looped = {}
    for node in reports:
        own = node.facts["looked_up"].get(node.facts["hostname"])
        if own and is_loopback(own[0]):
            looped[node.name] = own[0]
    if not looped:
        return
    hosts = {node.name: (node.facts["hostname"], node.address) for node in reports}
    typed = "; ".join(f"on {name}: {_named_right(name, *hosts[name])}" for name in list(looped)[:2])
    yield Finding(
        check="loopback-name",
        status="fail",
        nodes=tuple(looped),
        summary=f"{', '.join(looped)}: the host name means {next(iter(looped.values()))} on the node itself, so "
        "torchrun and gloo send a loopback address to the other nodes",
        fix=f"{typed}; or set GLOO_SOCKET_IFNAME and torchrun --local-addr (dtctl launch does)",
        evidence=tuple(f"{name}: its host name means {address} there" for name, address in looped.items()),
    )


def _check_localhost(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield a finding about nodes on which `localhost` is not a loopback address."""
    lost = {}
    for node in reports:
        found = node.facts["looked_up"].get("localhost")
        if found is not None and not (found and all(map(is_loopback, found))):
            lost[node.name] = ", ".join(found) or "nothing"
    if lost:
        yield Finding(
            check="names",
            status="fail",
            nodes=tuple(lost),
            summary="; ".join(f"{node}: localhost means {address}" for node, address in lost.items()),
            fix=f"on {', '.join(lost)}: write the line `127.0.0.1 localhost` into /etc/hosts, and no other address "
            f"for it",
            evidence=tuple(f"{node}: localhost is {address}" for node, address in lost.items()),
        )


def _check_shared_names(reports: Sequence[NodeReport], wanted: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding for each group of nodes that resolve the name of a node, or a wanted one, differently."""
    host_names = {node.facts["hostname"] for node in reports}
    looked_up = dict.fromkeys(name for node in reports for name in node.facts["looked_up"])
    findings: dict[tuple[str, ...], list[Finding]] = {}
    for name in looked_up:
        if name == "localhost" or not (name in host_names or name in wanted):
            continue
        answers = _collect_name_answers(reports, name)
        odd, usual = _find_odd_answers(answers, reports)
        if not odd:
            continue
        told = "; ".join(f"{node}: {answer or 'unknown'}" for node, answer in answers.items())
        is_own_name = any(node.name in odd and node.facts["hostname"] == name for node in reports)
        finding = Finding(
            check="names",
            status="fail" if is_own_name else "warn",
            nodes=odd,
            summary=f"{name} resolves to different addresses ({told})",
            fix=f"give {name} the address {usual or 'it really has'} in /etc/hosts of {', '.join(odd)}",
            evidence=tuple(f"{node}: {name} is {answer or 'unknown'}" for node, answer in answers.items()),
        )
        findings.setdefault(odd, []).append(finding)
    for same_nodes in findings.values():
        yield min(same_nodes, key=lambda finding: finding.status)


def _collect_name_answers(reports: Sequence[NodeReport], name: str) -> dict[str, str]:
    """Return node -> addresses of a name in a text, without nodes for which it is a loopback address."""
    answers = {}
    for node in reports:
        found = node.facts["looked_up"].get(name)
        is_local = bool(found) and is_loopback(found[0])
        if found is not None and not is_local:
            answers[node.name] = ", ".join(sorted(found))
    return answers


def _find_odd_answers(answers: Mapping[str, str], reports: Sequence[NodeReport]) -> tuple[tuple[str, ...], str | None]:
    """Return the nodes with another answer than the usual one, and that answer; None if no answer is usual."""
    odd, usual = find_odd_nodes(answers)
    if odd and usual is None:
        usual = _find_real_answer(answers, reports)
        if usual is not None:
            odd = tuple(node for node, answer in answers.items() if answer != usual)
    return odd, usual


def _find_real_answer(answers: Mapping[str, str], reports: Sequence[NodeReport]) -> str | None:
    """Return the only answer that has an address of a node; None if there is no such answer, or several."""
    real = {address for node in reports for address in node.facts["addresses"]}
    right = {answer for answer in answers.values() if not real.isdisjoint(answer.split(", "))}
    return right.pop() if len(right) == 1 else None


def _named_right(node: str, hostname: str, address: str) -> str:
    if hostname.partition(".")[0] == "localhost":
        return f"sudo hostnamectl set-hostname {node}, and `{address} {node}` in /etc/hosts"
    return (
        f"sudo sed -i -E '/^(127\\.|::1)/s/[[:space:]]{hostname}([[:space:]]|$)/ /' /etc/hosts && "
        f"echo '{address} {hostname}' | sudo tee -a /etc/hosts"
    )


def _same_names(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    owners: dict[str, list[str]] = {}
    for node in reports:
        owners.setdefault(node.facts["hostname"], []).append(node.name)
    for name, who in owners.items():
        if len(who) > 1:
            typed = "; ".join(f"on {node}: sudo hostnamectl set-hostname {node}" for node in who[:4])
            yield Finding(
                check="duplicate-hostname",
                status="warn",
                nodes=tuple(who),
                summary=f"{', '.join(who)} have one host name, {name}: Slurm, MPI, logs and torchrun's c10d take "
                "them for one machine",
                fix=f"give each node its own name: {typed}",
                evidence=tuple(f"{node}: hostname {name}" for node in who),
            )


def check_node_addresses(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about addresses that several nodes have, and about interfaces with different packet sizes."""
    yield from _check_duplicate_addresses(reports)
    yield from _check_duplicate_macs(reports)
    yield from _check_loopback_interfaces(reports)
    yield from _check_packet_sizes(reports)


def _check_duplicate_addresses(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about equal addresses; not about one that no traffic uses, such as that of docker0."""
    used = {node.address for node in reports}
    owners: dict[str, list[str]] = {}
    for node in reports:
        for address in node.facts["addresses"]:
            if address in used and not is_loopback(address):
                owners.setdefault(address, []).append(node.name)
    for address, who in owners.items():
        if len(who) > 1:
            yield Finding(
                check="duplicate-address",
                status="fail",
                nodes=tuple(who),
                summary=f"{address} is the address of several nodes: {', '.join(who)}",
                fix=f"remove it from all nodes but one: sudo ip addr del {address}/PREFIX dev INTERFACE",
                evidence=tuple(f"{owner} has {address}" for owner in who),
            )


def _check_loopback_interfaces(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    known = {node.name: node.facts["addresses"] for node in reports if node.facts["addresses"]}
    lacking = {name: addresses for name, addresses in known.items() if "127.0.0.1" not in addresses}
    if lacking:
        yield Finding(
            check="interface",
            status="warn",
            nodes=tuple(lacking),
            summary=f"{', '.join(lacking)}: no interface has 127.0.0.1, which programs on one machine use to "
            "connect to each other",
            fix=f"on {', '.join(lacking)}: sudo ip link set lo up; sudo ip addr add 127.0.0.1/8 dev lo",
            evidence=tuple(f"{name}: {', '.join(addresses)}" for name, addresses in lacking.items()),
        )


def _check_packet_sizes(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    mtu = {node.name: size for node in reports if (size := _read_interface_mtu(node, reports))}
    odd, usual = find_odd_nodes(mtu)
    if not odd:
        return
    wanted = usual or min(mtu.values())
    larger = [name for name in odd[:4] if mtu[name] != wanted]
    yield Finding(
        check="mtu",
        status="warn",
        nodes=odd,
        summary="the MTU differs between nodes: " + ", ".join(f"{node} {size}" for node, size in mtu.items()),
        fix="; ".join(f"on {name}: sudo ip link set dev {_way_of(name, reports)} mtu {wanted}" for name in larger),
        evidence=tuple(f"{node}: mtu {size}" for node, size in mtu.items()),
    )


def _check_duplicate_macs(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about equal MAC addresses of interfaces through which nodes reach each other."""
    owners: dict[str, list[tuple[str, str]]] = {}
    for node in reports:
        way = find_route_interface(node, reports)
        for interface in node.facts["interfaces"]:
            if interface["name"] == way and interface["mac"].strip("0:"):
                owners.setdefault(interface["mac"], []).append((node.name, way))
    for mac, who in owners.items():
        if len(who) > 1:
            duplicates = tuple(name for name, _ in who)
            yield Finding(
                check="duplicate-mac",
                status="fail",
                nodes=duplicates,
                summary=f"{', '.join(duplicates)} have one hardware address, {mac}: switches send packets to either "
                "of them",
                fix="give a cloned machine a MAC of its own: in the settings of the virtual machine or of netplan "
                f"(macaddress), then restart it; a trial at its console: sudo ip link set dev {who[-1][1]} address "
                f"02:{mac[3:-2]}{(int(mac[-2:], 16) + 1) % 256:02x}",
                evidence=tuple(f"{name}: {way} has {mac}" for name, way in who),
            )


def _way_of(name: str, reports: Sequence[NodeReport]) -> str:
    return next((find_route_interface(node, reports) for node in reports if node.name == name), "") or "INTERFACE"


def check_ephemeral_ports(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about ranges of ephemeral ports that are too small for a job's connections."""
    sizes = {node.name: (have[1] - have[0] + 1, have) for node in reports if len(have := node.facts["ports"]) == 2}
    for status, low, high in (("fail", 0, FEW_PORTS), ("warn", FEW_PORTS, SCARCE_PORTS)):
        few = {name: have for name, (size, have) in sizes.items() if low <= size < high}
        if few:
            first, last = next(iter(few.values()))
            yield Finding(
                check="ephemeral-ports",
                status="fail" if status == "fail" else "warn",
                nodes=tuple(few),
                summary=f"{', '.join(few)}: only the ports {first} to {last} are assigned, and each connection of "
                "gloo and NCCL takes one",
                fix=f"on {', '.join(few)}: sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999', also in "
                "/etc/sysctl.d",
                evidence=tuple(f"{name}: net.ipv4.ip_local_port_range = {a} {b}" for name, (a, b) in few.items()),
            )


def _read_interface_mtu(node: NodeReport, reports: Sequence[NodeReport]) -> int:
    """Return the MTU of the interface towards the other nodes; 0 if it is not known."""
    sizes = {interface["name"]: int(interface["mtu"]) for interface in node.facts["interfaces"]}
    ways = [node.facts["ways"].get(other.address, "") for other in reports if other is not node]
    return next((sizes[way] for way in ways if way in sizes), 0)


def check_node_pairs(
    reports: Sequence[NodeReport], *, rendezvous: Sequence[int], fixed: bool, explained: Collection[str] = ()
) -> Iterator[Finding]:
    """Yield findings from the calls between all ordered pairs of nodes.

    Args:
        reports: the nodes that took part, the head node first.
        rendezvous: rendezvous port, or candidates for it.
        fixed: whether the spec requires that port.
        explained: nodes that cannot be reached for a reason that another finding reports.
    """
    head = reports[0]
    port = head.ports.get("rendezvous", 1)
    if port < 0:
        yield _build_bind_error_finding(head, rendezvous[0], -port, fixed=fixed)
    failed, alone = _failed_calls(reports, {node.name for node in reports} - {*explained})
    yield from _full_tables(failed)
    # If the data ports of a pair also fail, the rendezvous port is no separate fault.
    also = {(caller, called) for caller, called, _ in failed["data"]}
    for kind in ("rendezvous", "later"):
        failed[kind] = [one for one in failed[kind] if one[:2] not in also]
    blamed: set[str] = set()
    for kind, calls in failed.items():
        if calls:
            finding = _build_blocked_ports_finding(kind, calls, reports, fixed=fixed)
            blamed |= {*finding.nodes}
            yield finding
    for name, call in alone.items():
        if name not in blamed:
            yield _build_self_call_finding(next(node for node in reports if node.name == name), call)
    yield from _check_answered_calls(reports)


_Call = tuple[str, str, Mapping[str, Any]]


def _failed_calls(
    reports: Sequence[NodeReport], alive: Collection[str]
) -> tuple[dict[str, list[_Call]], dict[str, Mapping[str, Any]]]:
    """Return the failed calls between nodes by the kind of port, and the failed calls of nodes to themselves."""
    head = reports[0].name
    failed: dict[str, list[_Call]] = {"data": [], "rendezvous": [], "later": []}
    alone: dict[str, Mapping[str, Any]] = {}
    for node in reports:
        for answer in node.answers:
            # A node that was lost in the meantime does not answer; another finding reports this.
            if answer["result"] not in (*_WORDS, NO_ROOM) or answer["node"] not in alive or answer["kind"] == REACHED:
                continue
            if answer["node"] == node.name:
                if answer["result"] != "stranger":  # the duplicate address is reported elsewhere
                    alone.setdefault(node.name, answer)
                continue
            kind = "rendezvous" if answer["kind"] in ("rendezvous", MEETING) else "data"
            if answer["kind"] == MEETING and answer["node"] != head:
                kind = "later"
            failed[kind].append((node.name, answer["node"], answer))
        failed["data"] += [one for one in _find_unmeasured_calls(node, reports) if one[1] in alive]
    return failed, alone


def _full_tables(failed: dict[str, list[_Call]]) -> Iterator[Finding]:
    """Yield a finding about nodes with a full neighbour table, and remove the failed calls that it explains."""
    ways = [one[:2] for calls in failed.values() for one in calls if one[2]["result"] == NO_ROOM]
    nodes = tuple(dict.fromkeys(caller for caller, _ in ways))
    if not nodes:
        return
    for kind, calls in failed.items():  # such a node also does not answer calls
        explained = [one for one in calls if one[2]["result"] in ("dropped", NO_ROOM) and {*nodes} & {*one[:2]}]
        failed[kind] = [one for one in calls if one not in explained]
    yield Finding(
        check="neighbour-table",
        status="fail",
        nodes=nodes,
        peers=tuple(dict.fromkeys(called for _, called in ways if called not in nodes)),
        summary=f"{', '.join(nodes)}: the kernel's table of neighbours is full, and packets to machines that are not "
        "in it are dropped",
        fix=f"on {', '.join(nodes)}: sudo sysctl -w net.ipv4.neigh.default.gc_thresh3=16384 "
        "net.ipv4.neigh.default.gc_thresh2=8192, also in /etc/sysctl.d; containers share the table of their machine",
        evidence=tuple(
            f"{caller} -> {called}: a datagram fails with ENOBUFS" for caller, called in dict.fromkeys(ways)
        ),
        ways=tuple(dict.fromkeys(ways)),
    )


def _find_unmeasured_calls(node: NodeReport, reports: Sequence[NodeReport]) -> Iterator[_Call]:
    """Yield pairs whose calls succeeded, but which could not connect for the measurement.

    A firewall rule may depend on the caller's port, which changes with each call, or may have been added in between.
    """
    for other in reports:
        tries = node.measured.get(other.name, [])
        if links.has_never_connected(tries):
            last = {**tries[-1], "said": tries[-1]["error"], "port": other.ports["data-0"]}
            yield node.name, other.name, last


def _build_self_call_finding(node: NodeReport, answer: Mapping[str, Any]) -> Finding:
    down = any(interface["name"] == "lo" and not interface["up"] for interface in node.facts["interfaces"])
    return Finding(
        check="data-ports",
        status="fail",
        nodes=(node.name,),
        summary=f"{node.name} cannot call itself at its own address: connections {_WORDS.get(answer['result'], 'fail')}"
        + (", and its loopback interface is down" if down else ""),
        fix=f"on {node.name}: sudo ip link set lo up"
        if down
        else f"on {node.name}: let the loopback interface pass: sudo iptables -I INPUT -i lo -j ACCEPT "
        "(sudo iptables -S; sudo nft list ruleset)",
        evidence=(f"{node.name} -> itself:{answer['port']}: {answer['result']} ({answer.get('said', '')})",),
        ways=((node.name, node.name),),
    )


def _build_bind_error_finding(head: NodeReport, port: int, number: int, *, fixed: bool) -> Finding:
    hint = "or let dtctl choose: network.rendezvous_port: auto" if fixed else "or end the process that uses it"
    return Finding(
        check="rendezvous-port",
        status="fail",
        nodes=(head.name,),
        summary=f"{head.name}: the rendezvous port {port} cannot be used: {os.strerror(number)}",
        fix=f"find its owner with ss -ltnp 'sport = :{port}', {hint}",
        evidence=(f"bind to port {port}: {os.strerror(number)}",),
    )


def _build_blocked_ports_finding(
    kind: str, failed: Sequence[_Call], reports: Sequence[NodeReport], *, fixed: bool
) -> Finding:
    ways = list(dict.fromkeys((caller, called) for caller, called, _ in failed))
    routed = [(caller, text) for caller, called in ways if (text := _describe_route_fix(caller, called, reports))]
    nodes = tuple(dict.fromkeys(caller for caller, _ in routed)) or choose_covering_nodes(ways)
    peers = tuple(dict.fromkeys(name for way in ways for name in way if name not in nodes))
    numbers = sorted({int(answer["port"]) for _, _, answer in failed})
    which, range_ = _describe_blocked_ports(kind, numbers, ways, reports, fixed=fixed)
    by_result: dict[str, list[tuple[str, str]]] = {}
    for caller, called, answer in failed:
        by_result.setdefault(str(answer["result"]), []).append((caller, called))
    # A refused connection is better evidence than a dropped one, since a stateless filter also drops the answers to
    # outgoing connections.
    told = "; ".join(
        f"{_WORDS[word]}: {_format_node_pairs(by_result[word])}" for word in reversed(_WORDS) if word in by_result
    )
    typed = [text for _, text in routed] or _build_firewall_commands(ways, nodes, reports, range_)
    return Finding(
        check="data-ports" if kind == "data" else "rendezvous-port",
        status="warn" if kind == "later" else "fail",
        nodes=nodes,
        peers=peers,
        summary=f"connections to {which} {told}",
        fix="; ".join(dict.fromkeys(typed))
        if routed
        else f"{'; '.join(typed)}; see what is there with sudo iptables -S "
        "and sudo nft list ruleset, and in the security group",
        evidence=tuple(
            f"{caller} -> {called}:{answer['port']}: {answer['result']} ({answer.get('said', '')})"
            for caller, called, answer in failed[:8]
        ),
        ways=tuple(ways),
    )


def _describe_blocked_ports(
    kind: str, numbers: Sequence[int], ways: Sequence[tuple[str, str]], reports: Sequence[NodeReport], *, fixed: bool
) -> tuple[str, str]:
    """Return a description of the blocked ports, and the range of ports to allow; empty: the ephemeral ports."""
    tried = ", ".join(map(str, numbers[:4])) + (" ..." if len(numbers) > 4 else "")
    if kind == "data":
        passed = any(
            call["result"] == "ok" and call["kind"] != MEETING and (node.name, call["node"]) in ways
            for node in reports
            for call in node.answers
        )
        some = f"some of the ports that workers get ({tried}; others pass)"
        return some if passed else "random ports, as workers use them,", ""
    if fixed:
        return f"the rendezvous port {numbers[0]}", str(numbers[0])
    range_ = f"{node_facts.FIRST_PORT}:{node_facts.LAST_PORT}"
    if kind == "later":
        instead = "for the rendezvous if another node replaces a lost head node"
        return f"ports {instead} ({range_}, tried {tried})", range_
    return f"ports of which each launch takes one for its rendezvous ({range_}, tried {tried})", range_


def _build_firewall_commands(
    ways: Sequence[tuple[str, str]], nodes: Sequence[str], reports: Sequence[NodeReport], port: str
) -> list[str]:
    """Return commands that allow these connections on the nodes to fix, or on both ends of a single pair."""
    of = {node.name: node for node in reports}
    commands = []
    for name in nodes if len(ways) > 1 else dict.fromkeys(name for way in ways for name in reversed(way)):
        into = [caller for caller, called in ways if called == name]
        out = [called for caller, called in ways if caller == name]
        if into:
            range_ = port or ":".join(map(str, of[name].facts["ports"])) or "32768:60999"
            sources = ",".join(of[one].address for one in into)
            commands.append(
                f"on {name}: let TCP {range_} in from {', '.join(into)}: sudo iptables -I INPUT -p tcp -s {sources} "
                f"--dport {range_} -j ACCEPT"
            )
        if out:
            range_ = port or "32768:60999"
            targets = ",".join(of[one].address for one in out)
            commands.append(
                f"on {name}: let TCP {range_} out to {', '.join(out)}: sudo iptables -I OUTPUT -p tcp -d {targets} "
                f"--dport {range_} -j ACCEPT"
            )
    return commands


def _describe_route_fix(caller: str, called: str, reports: Sequence[NodeReport]) -> str:
    """Return the command that corrects a wrong route or neighbour entry of the calling node; empty without one."""
    of = {node.name: node for node in reports}
    one, other = of[caller], of[called]
    address = other.data_address
    if is_loopback(address):
        return (
            f"{address}, the address of {called}, is {caller} itself on {caller}: a tunnel ends on this machine alone; "
            f"set `address` of {called} in cluster.nodes to one at which {caller} reaches it"
        )
    usual = next(
        (way for node in reports if node.name not in (caller, called) if (way := one.facts["ways"].get(node.address))),
        "",
    )
    way = one.facts["ways"].get(other.address, "")
    if address == other.address and not way:
        return (
            f"{caller} has no route to {called}: on {caller}: ip route get {address}; what `ip route show {address}` "
            f"lists as blackhole, unreachable or prohibit goes with sudo ip route del KIND {address}"
        )
    if address == other.address and usual and way != usual:
        return (
            f"{caller} sends to {called} by {way} and to the others by {usual}: on {caller}: ip route get {address}; "
            f"sudo ip route del {address}/32 dev {way}"
        )
    macs = {row["mac"] for row in other.facts["interfaces"]}
    known = one.facts["neighbours"].get(address, "")
    if known and known not in macs:
        return (
            f"{caller} sends to {called} at {known}, which is not one of its network cards: on {caller}: "
            f"sudo ip neigh del {address} dev {way or 'INTERFACE'}"
        )
    return ""


def _format_node_pairs(ways: Sequence[tuple[str, str]]) -> str:
    told = list(dict.fromkeys(f"{caller} to {called}" for caller, called in ways))
    return ", ".join(told[:6]) + (" ..." if len(told) > 6 else "")


def _check_answered_calls(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about successful calls: lost large packets, another node that answered, translated addresses."""
    answered = [
        (node.name, str(answer["node"]), answer)
        for node in reports
        for answer in node.answers
        if answer["kind"] != REACHED and answer["node"] != node.name
    ]
    if large := [call for call in answered if call[2]["result"] == "large-lost"]:
        yield _build_large_packets_finding(large, reports)
    if strange := [call for call in answered if call[2]["result"] == "stranger"]:
        yield _build_stranger_finding(strange)
    if seen := [call for call in answered if call[2].get("seen") and call[2]["seen"] != call[2]["own"]]:
        yield _build_translation_finding(seen)


def _build_large_packets_finding(calls: Sequence[_Call], reports: Sequence[NodeReport]) -> Finding:
    ways = list(dict.fromkeys((caller, called) for caller, called, _ in calls))
    nodes = choose_covering_nodes([(caller, called) for caller, called, _ in calls])
    return Finding(
        check="large-packets",
        status="fail",
        nodes=nodes,
        peers=tuple(dict.fromkeys(name for way in ways for name in way if name not in nodes)),
        summary=f"large packets are lost, small ones arrive: {_format_node_pairs(ways)}",
        fix=f"set the same MTU everywhere on the way (ip link show {_way_of(nodes[0], reports)}; switch, tunnel), "
        "let ICMP `fragmentation needed` pass, or on both ends: sudo sysctl -w net.ipv4.tcp_mtu_probing=1",
        evidence=tuple(f"{caller} -> {called}: connected, 256 KiB did not arrive" for caller, called in ways[:8]),
        ways=tuple(ways),
    )


def _build_stranger_finding(calls: Sequence[_Call]) -> Finding:
    told = [(caller, called, str(answer["said"])) for caller, called, answer in calls]
    return Finding(
        check="duplicate-address",
        status="fail",
        nodes=tuple(dict.fromkeys(called for _, called, _ in told)),
        peers=tuple(dict.fromkeys(caller for caller, _, _ in told)),
        summary="; ".join(f"{caller} called {called}, and {who} answered" for caller, called, who in told[:4]),
        fix="find who else has that address: arping -D -I INTERFACE ADDRESS",
        evidence=tuple(f"{caller} -> {called}: answered by {who}" for caller, called, who in told[:8]),
    )


def _build_translation_finding(calls: Sequence[_Call]) -> Finding:
    told = [(caller, called, str(answer["own"]), str(answer["seen"])) for caller, called, answer in calls]
    return Finding(
        check="nat",
        status="fail",
        nodes=tuple(dict.fromkeys(caller for caller, _, _, _ in told)),
        peers=tuple(dict.fromkeys(called for _, called, _, _ in told)),
        summary="addresses are translated on the way: "
        + "; ".join(f"{called} sees {caller} ({own}) come from {other}" for caller, called, own, other in told[:4]),
        fix="use the host's network in containers (--network host), and take the translation (SNAT, masquerade) "
        "off between the nodes: sudo iptables -t nat -S",
        evidence=tuple(f"{caller} -> {called}: {own} became {other}" for caller, called, own, other in told[:8]),
    )
