"""Findings of the checks of a cluster: their order, and the one that explains the others. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from dtctl.schema import check_prose

Status = Literal["ok", "warn", "fail", "skip"]
Value = TypeVar("Value")

CHECKS = (
    "reach", "host-key", "login", "start-up", "python", "shell-output", "clock", "slow-login",
    "disk", "workdir", "tmpdir", "nofile", "processes", "memory", "limits", "memlock", "shm",
    "python-environment", "shadowing", "python-version", "torch", "nccl", "architecture", "code",
    "gpus", "gpu-xid", "gpu-ecc", "gpu-driver", "gpu-model", "gpu-links", "gpu-busy", "gpu-power", "gpu-clocks",
    "gpu-pcie", "gpu-mig", "gpu-speed", "gpu-copies", "gpu-nccl", "rdma", "link-speed",
    "duplicate-mac", "duplicate-address", "duplicate-hostname", "loopback-name", "names", "interface",
    "rendezvous-address", "ephemeral-ports", "neighbour-table",
    "data-ports", "rendezvous-port", "large-packets", "stream", "nat", "mtu",
    "packet-loss", "duplicate-packets", "bandwidth", "latency",
    "path", "shared", "visibility", "cache", "file-variable", "cpus",
    "env-differs", "env-unknown", "env-dead", "env-dangerous",
    "partition", "account", "time-limit", "requeue", "job-nodes", "gres", "features", "submit", "tasks", "time-left",
    "collective",
)  # fmt: skip
"""All checks, each after those that can be its cause: the first failure in this order is the primary one."""
MAX_EVIDENCE = 1024
"""Largest number of lines of evidence; a cluster with many nodes has one line per node."""
_SEVERITY = {"fail": 0, "warn": 1, "skip": 2, "ok": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check."""

    check: str
    status: Status
    nodes: tuple[str, ...] = ()
    """Nodes that need a repair."""
    peers: tuple[str, ...] = ()
    """Nodes at the other ends, if the check concerns pairs."""
    summary: str = ""
    fix: str = ""
    evidence: tuple[str, ...] = ()
    ways: tuple[tuple[str, str], ...] = ()
    """Pairs (caller, called) with the problem, if the check concerns pairs."""
    primary: bool = False
    follows: str = ""
    """Check whose failure explains this one."""
    missing: bool = False
    """True, with status `skip`, if a launch depends on the part that was not examined; False if there was nothing to
    examine."""

    def as_json(self) -> dict[str, Any]:
        """Return the object that `dtctl doctor --json` prints."""
        return asdict(self)


def order_findings(
    found: Iterable[Finding], *, ran: Iterable[str], unexamined: Iterable[Finding] = ()
) -> list[Finding]:
    """Return all findings, the primary one first, then by severity; checks without findings are ok.

    Args:
        found: warnings and failures.
        ran: names of the checks that were made.
        unexamined: findings of status `skip`, about parts that were not examined; they are neither ok nor wrong.
    """
    bad = sorted(
        map(_shorten_finding, found), key=lambda finding: (_SEVERITY[finding.status], CHECKS.index(finding.check))
    )
    if bad:
        bad.insert(0, bad.pop(_find_primary_index(bad)))
        bad[0] = replace(bad[0], primary=True)
        bad[1:] = [_mark_consequence(finding, bad[0]) for finding in bad[1:]]
    named = {finding.check for finding in bad}
    # For a check with findings, a `skip` because there was nothing to examine adds no information.
    skipped = [_shorten_finding(one) for one in unexamined if one.missing or one.check not in named]
    skipped.sort(key=lambda finding: CHECKS.index(finding.check))
    ok = set(ran) - named - {one.check for one in skipped}
    return [*bad, *skipped, *(Finding(check=check, status="ok") for check in CHECKS if check in ok)]


def _shorten_finding(finding: Finding) -> Finding:
    """Return a finding with shortened texts, since nodes' reports may be long."""
    evidence = tuple(check_prose(line) for line in finding.evidence[:MAX_EVIDENCE])
    if len(finding.evidence) > MAX_EVIDENCE:
        evidence += (f"and {len(finding.evidence) - MAX_EVIDENCE} more",)
    return replace(finding, summary=check_prose(finding.summary), fix=check_prose(finding.fix), evidence=evidence)


_EXPLAINS = {
    "duplicate-address": ("data-ports", "rendezvous-port", "large-packets", "nat", "names"),
    "data-ports": ("rendezvous-port", "large-packets", "stream", "packet-loss", "bandwidth", "latency"),
    "large-packets": ("bandwidth", "packet-loss", "stream"),
    "stream": ("bandwidth",),
    "duplicate-mac": (
        "data-ports",
        "rendezvous-port",
        "large-packets",
        "stream",
        "packet-loss",
        "bandwidth",
        "latency",
    ),
    "ephemeral-ports": ("data-ports", "rendezvous-port"),
    "neighbour-table": ("data-ports", "rendezvous-port", "large-packets", "bandwidth", "packet-loss", "latency"),
    "interface": ("data-ports", "rendezvous-port", "rendezvous-address", "collective"),
    "shadowing": ("torch", "collective", "python-environment"),
    "python-environment": ("torch", "python-version", "nccl", "collective"),
    "memory": ("collective", "python-environment"),
    "processes": ("collective", "python-environment", "data-ports"),
    "duplicate-hostname": ("names",),
    "job-nodes": ("submit",),
    "packet-loss": ("data-ports", "rendezvous-port", "large-packets", "bandwidth", "latency"),
    "bandwidth": ("latency", "packet-loss"),
    "mtu": ("large-packets",),
    "loopback-name": ("names",),
    "tmpdir": ("cache",),
    "disk": ("workdir",),
    "torch": ("nccl",),
    "path": ("shared",),
}


_ROOT = {"bandwidth": "packet-loss"}
"""Check -> a cause that can look less severe: TCP over a link that loses 2% is slow beyond proportion."""


def _find_primary_index(bad: Sequence[Finding]) -> int:
    """Return the index of the primary finding: the most severe one, or its cause at one end of all its pairs."""
    ends = [{*bad[0].nodes}, {*bad[0].peers}]
    for place, finding in enumerate(bad):
        if finding.check == _ROOT.get(bad[0].check) and any(end and end <= {*finding.nodes} for end in ends):
            return place
    return 0


def _mark_consequence(finding: Finding, primary: Finding) -> Finding:
    if finding.ways and primary.ways:  # two faults on different pairs are independent
        touched = bool({frozenset(way) for way in finding.ways} & {frozenset(way) for way in primary.ways})
    else:
        touched = bool({*finding.nodes, *finding.peers} & {*primary.nodes})
    if finding.check in _EXPLAINS.get(primary.check, ()) and touched:
        return replace(finding, follows=primary.check)
    return finding


def find_odd_nodes(values: Mapping[str, Value]) -> tuple[tuple[str, ...], Value | None]:
    """Return the nodes that differ from the majority, and the majority's value; without one, all nodes and None."""
    counted = Counter(values.values()).most_common()
    if len(counted) < 2:
        return (), counted[0][0] if counted else None
    if counted[0][1] == counted[1][1]:
        return tuple(values), None
    return tuple(node for node, value in values.items() if value != counted[0][0]), counted[0][0]


def choose_covering_nodes(pairs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return a few nodes that cover all failing (caller, called) pairs, to check their firewall or cable first.

    For a single pair it is the called node: a filter that drops packets is usually on the receiver's side.
    """
    left = list(dict.fromkeys(pairs))
    chosen: list[str] = []
    while left:
        as_called = Counter(called for _, called in left)
        as_any = as_called + Counter(caller for caller, _ in left)
        best = max(as_any, key=lambda node: (as_any[node], as_called[node]))
        chosen.append(best)
        left = [pair for pair in left if best not in pair]
    return tuple(chosen)
