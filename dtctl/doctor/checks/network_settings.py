"""Settings of nodes that can cause what was measured there: they are read after a symptom, and become its evidence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from dtctl.doctor.findings import Finding
from dtctl.doctor.node_probes import NodeProbes
from dtctl.doctor.node_report import NodeReport
from dtctl.supervisor.messages.probe import QueryNetworkSettings

LIMIT_S: Final = 20.0
MOST_NODES: Final = 16
"""Largest number of nodes whose settings are read."""
MOST_LINES: Final = 4
"""Largest number of lines of one node and one kind in the evidence."""
SMALL_BUFFER: Final = 256 << 10
"""Bytes below which the largest buffer of a connection limits it: 10 Gbit/s with 0.2 ms there and back need 250 kB."""
REFUSED: Final = frozenset({"data-ports", "rendezvous-port", "stream", "nat", "large-packets"})
"""Symptoms of connections that are refused, lost, or changed."""
SLOWED: Final = frozenset({"bandwidth", "latency", "packet-loss", "duplicate-packets"})
"""Symptoms of connections that are slow, or lose packets."""
_COUNTING: Final = re.compile(
    r"-m (limit|hashlimit|connlimit|connbytes|quota|statistic|recent|length)\b|-j TEE|limit rate|ct count|quota|numgen"
)
_TYPED: Final = re.compile(r"[\w ./:,!=+@%-]+")
"""Text of a node that may stand in a command, which people copy into a shell."""
Settings = Mapping[str, Any]


def add_network_settings(
    probes: NodeProbes, reports: Sequence[NodeReport], findings: Sequence[Finding]
) -> list[Finding]:
    """Return the findings, those of the network with the settings of their nodes that can be the cause."""
    there = {report.name for report in reports if report.error is None}
    symptoms = [finding for finding in findings if finding.check in REFUSED | SLOWED]
    names = dict.fromkeys(name for finding in symptoms for name in (*finding.nodes, *finding.peers) if name in there)
    chosen = list(names)[:MOST_NODES]
    if not chosen:
        return list(findings)
    settings = probes.send_requests(
        {name: QueryNetworkSettings() for name in chosen}, limit_s=LIMIT_S, doing="reading the settings of the network"
    )
    return [explain_by_settings(finding, settings) for finding in findings]


def explain_by_settings(finding: Finding, settings: Mapping[str, Settings]) -> Finding:
    """Return a finding with the settings that can be its cause, as evidence and with the command that changes them.

    Args:
        finding: any finding; those that are no symptom stay as they are.
        settings: node -> its settings, from `read_network_settings`.
    """
    if finding.check not in REFUSED | SLOWED:
        return finding
    evidence: list[str] = []
    fixes: list[str] = []
    for name in (*finding.nodes, *finding.peers):
        for text, fix in list_suspects(finding.check, settings[name]) if name in settings else ():
            evidence.append(f"{name} has {text}")
            fixes.append(f"on {name}: {fix}")
        unread = settings.get(name, {}).get("unread")
        if unread and finding.check in REFUSED | {"packet-loss"}:
            evidence.append(f"{name}: its packet filters were not read ({unread})")
    if not fixes:
        return replace(finding, evidence=(*finding.evidence, *evidence))
    fix = f"{'; '.join(dict.fromkeys(fixes))}, if it is not meant to be so; else {finding.fix}"
    return replace(finding, evidence=(*finding.evidence, *evidence), fix=fix)


def list_suspects(check: str, settings: Settings) -> list[tuple[str, str]]:
    """Return the settings of a node that can cause a symptom, each with the command that changes it."""
    found: list[tuple[str, str]] = []
    if check in SLOWED:
        found += _list_small_buffers(settings["sysctls"])
        found += [
            (f"a queue: {line}", f"sudo tc qdisc del dev {device} root")
            for line in settings["queues"][:MOST_LINES]
            if _TYPED.fullmatch(device := _find_word_after("dev", line))
        ]
    is_relevant: Callable[[str], Any] = _COUNTING.search if check in SLOWED else bool
    found += [
        (f"a packet filter: {line}", _format_filter_removal(line))
        for line in [line for line in settings["filters"] if is_relevant(line)][:MOST_LINES]
    ]
    if check in REFUSED:
        found += [
            (f"a route: {line}", f"sudo ip {_format_route_removal(line)}") for line in settings["routes"][:MOST_LINES]
        ]
        found += _find_full_table(settings["sysctls"])
    return found


def _list_small_buffers(sysctls: Mapping[str, str]) -> list[tuple[str, str]]:
    usual = {"net.ipv4.tcp_rmem": "4096 131072 6291456", "net.ipv4.tcp_wmem": "4096 16384 4194304"}
    return [
        (f"{name} = {sysctls[name]}, at most {largest >> 10} KiB for a connection", f"sudo sysctl -w {name}='{value}'")
        for name, value in usual.items()
        if (largest := _read_last_number(sysctls.get(name, ""))) is not None and largest < SMALL_BUFFER
    ]


def _find_full_table(sysctls: Mapping[str, str]) -> list[tuple[str, str]]:
    most = _read_last_number(sysctls.get("net.netfilter.nf_conntrack_max", ""))
    count = _read_last_number(sysctls.get("net.netfilter.nf_conntrack_count", ""))
    if most is None or count is None or count < 0.95 * most:
        return []
    text = f"{count} of at most {most} connections in the kernel's table (nf_conntrack)"
    return [(text, f"sudo sysctl -w net.netfilter.nf_conntrack_max={max(4 * most, 262_144)}")]


def _read_last_number(text: str) -> int | None:
    words = text.split()
    return int(words[-1]) if words and words[-1].isascii() and words[-1].isdecimal() and len(words[-1]) < 19 else None


def _find_word_after(word: str, line: str) -> str:
    words = line.split()
    return words[words.index(word) + 1] if word in words[:-1] else ""


def _format_filter_removal(line: str) -> str:
    """Return the command that removes a rule of iptables-save; the look at all rules for other lines."""
    if not _TYPED.fullmatch(line):
        return "remove that rule: sudo iptables -S; sudo nft -a list ruleset"
    if line.startswith("-A "):
        return f"sudo iptables {_choose_table(line)}-D {line[3:]}"
    if line.startswith(":"):
        return f"sudo iptables -P {line[1:].split(maxsplit=1)[0]} ACCEPT"
    return "remove that rule: sudo nft -a list ruleset; sudo nft delete rule"


def _choose_table(line: str) -> str:
    if re.search(r"-j ([DS]NAT|REDIRECT|MASQUERADE)", line):
        return "-t nat "
    return "-t mangle " if "-j TEE" in line else ""


def _format_route_removal(line: str) -> str:
    """Return the arguments of `ip` that remove a route, or a rule of the routing policy, which begins with a number."""
    number, colon, rest = line.partition(":")
    is_rule = bool(colon) and number.isdecimal()
    if not _TYPED.fullmatch(line):
        return "rule; ip route show table all" if is_rule else "route show table all"
    return f"rule del {' '.join(rest.split())}" if is_rule else f"route del {line}"
