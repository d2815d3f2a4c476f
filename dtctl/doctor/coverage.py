"""Needs of a launch that were not examined, with their nodes and the reasons. Pure.

Each omitted part of an examination is a finding with status `skip`. `missing` is set if a launch depends on the omitted
part; otherwise there was nothing to examine. The report states that nodes can train only if nothing has failed and
nothing is missing: this follows from these findings alone, not from the reason for a gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from dtctl.doctor.checks import address_checks, collective, hardware, links, network
from dtctl.doctor.findings import Finding
from dtctl.doctor.node_report import NodeReport, find_good_ways

Way = tuple[str, str]


def find_unexamined_needs(
    reports: Sequence[NodeReport],
    *,
    skip: Collection[str],
    ran: Collection[str],
    rendezvous: bool,
    found: Iterable[Finding] = (),
) -> Iterator[Finding]:
    """Yield a finding for each check that was not made.

    Args:
        reports: reports of the nodes, the head node first.
        skip: layers that the user excluded.
        ran: names of the checks that were made.
        rendezvous: whether the examination includes calls to a port of the head node.
        found: failures; a check that has failed on a node is not reported as omitted there.
    """
    well = [one for one in reports if one.error is None and one.facts]
    failed = {(one.check, node) for one in found for node in (*one.nodes, *one.peers) if one.status == "fail"}
    yield from _find_gaps_between_nodes(reports, skip, ran)
    if len(reports) > 1 and "collective" not in ran:
        yield _build_collective_gap(reports, well, skip)
    if well:
        yield from _list_absent_devices(well)
    if len(reports) > 1 and well and well[0] is not reports[0]:
        yield from _list_head_node_gaps(reports[0].name)
    for check, whys in _find_node_gaps(well).items():
        yield from _by_reason(check, {name: why for name, why in whys.items() if (check, name) not in failed})
    if len(reports) > 1:
        untried = _list_untried_ways(reports, well, rendezvous=rendezvous, measured="links" not in skip)
        yield from _find_untried_ways(untried, failed)


def _find_gaps_between_nodes(
    reports: Sequence[NodeReport], skip: Collection[str], ran: Collection[str]
) -> Iterator[Finding]:
    names = [report.name for report in reports]
    if len(names) < 2:
        alone = "there is one node, and nothing between nodes to look at"
        without = () if "collective" in ran else collective.RAN
        between = (name for name in (*network.RAN, *links.RAN, *without) if name != "ephemeral-ports")
        yield from (_build_skip_finding(name, alone) for name in between)
    elif "links" in skip:
        left_out = "bandwidth, loss and delay between nodes were left out"
        yield from (_build_gap_finding(name, left_out, names) for name in links.RAN)


def _build_collective_gap(reports: Sequence[NodeReport], well: Sequence[NodeReport], skip: Collection[str]) -> Finding:
    lacking = [report.name for report in well if not report.facts["job"].get("torch")]
    why = "torch was not run"
    if lacking and "collective" not in skip:
        why += f": the job's Python has none on {', '.join(lacking)}"
    elif "collective" not in skip:
        why += ", because of what has failed"
    return _build_gap_finding("collective", why, [report.name for report in reports])


def _list_absent_devices(well: Sequence[NodeReport]) -> Iterator[Finding]:
    if not any(one.facts["gpus"] for one in well):
        yield from (_build_skip_finding(name, "no node shows a GPU") for name in hardware.RAN if name.startswith("gpu"))
    if not any(one.facts["rdma"] for one in well):
        yield _build_skip_finding("rdma", "no node has an InfiniBand or RoCE port")


def _list_head_node_gaps(head: str) -> Iterator[Finding]:
    yield _build_gap_finding("rendezvous-port", f"the head node {head} could not be called", [head])
    for name in address_checks.RAN[1:]:
        yield _build_gap_finding(name, "the head node did not answer", [head])


def _find_node_gaps(well: Sequence[NodeReport]) -> dict[str, dict[str, str]]:
    """Return check -> node -> reason of a gap, for the facts that each node reports about itself."""
    gaps: dict[str, dict[str, str]] = {}
    for node in well:
        for check, is_gap, why in _GAPS:
            if is_gap(node.facts):
                gaps.setdefault(check, {})[node.name] = why
        lost = [name for name, addresses in node.facts["looked_up"].items() if addresses is None]
        if lost:
            why = f"the name service did not answer in time for the addresses of {', '.join(lost[:3])}"
            gaps.setdefault("names", {})[node.name] = why
    return gaps


def _has_no_python(facts: Mapping[str, Any]) -> bool:
    return not facts["job"].get("python") and not facts["job"].get("error")


def _has_silent_gpu_tool(facts: Mapping[str, Any]) -> bool:
    return bool(facts["gpus"]) and not facts["gpu"] and not facts["gpu_error"]


_GAPS: Final[Sequence[tuple[str, Callable[[Mapping[str, Any]], bool], str]]] = (
    ("python-environment", _has_no_python, "the job's Python was not examined"),
    (
        "torch",
        lambda facts: not _has_no_python(facts) and facts["job"].get("torch") == "unknown",
        "which torch the job has could not be determined",
    ),
    ("disk", lambda facts: not facts["disk"]["total"], "how full the disk of the workdir is could not be determined"),
    ("shm", lambda facts: not facts["shm"]["total"], "how large /dev/shm is could not be determined"),
    (
        "memory",
        lambda facts: facts["memory_limit"] < 0 and facts["memory_free"] < 0,
        "how much memory is left could not be determined",
    ),
    ("duplicate-address", lambda facts: not facts["addresses"], "its addresses could not be determined"),
    (
        "gpu-xid",
        lambda facts: bool(facts["gpus"]) and not facts["xid_source"],
        "the kernel's messages may not be read: GPU errors were not looked for",
    ),
    ("gpu-ecc", _has_silent_gpu_tool, "the GPU tool reports nothing about them"),
    ("gpu-busy", _has_silent_gpu_tool, "the GPU tool reports nothing about them"),
)
"""Checks that need a fact, functions that return whether a node's facts lack it, and reasons for the report."""


def _list_untried_ways(
    reports: Sequence[NodeReport], well: Sequence[NodeReport], *, rendezvous: bool, measured: bool
) -> dict[str, list[Way]]:
    """Return check -> pairs of nodes (caller, called) that it did not test, though both nodes answer."""
    every = [(report.name, other.name) for report in well for other in well if report is not other]
    calls = [(node.name, str(answer["node"]), str(answer["kind"])) for node in well for answer in node.answers]
    called_for_data = {(caller, called) for caller, called, kind in calls if kind.startswith("data-")}
    untried = {"data-ports": [way for way in every if way not in called_for_data]}
    head = reports[0]
    if rendezvous and well and well[0] is head and head.ports.get("rendezvous", 1) > 0:
        called = {(caller, node) for caller, node, kind in calls if kind == "rendezvous"}
        untried["rendezvous-port"] = [way for way in every if way[1] == head.name and way not in called]
    if measured:
        good = find_good_ways(well)
        done = {(node.name, other) for node in well for other, tries in node.measured.items() if _is_measured(tries)}
        untried["bandwidth"] = [way for way in every if way in good and way not in done]
    return untried


def _find_untried_ways(untried: Mapping[str, Sequence[Way]], failed: Collection[tuple[str, str]]) -> Iterator[Finding]:
    """Yield findings about pairs of nodes that were not tested, without those of nodes whose check has failed."""
    for check, ways in untried.items():
        lost = [way for way in ways if (check, way[0]) not in failed and (check, way[1]) not in failed]
        if not lost:
            continue
        shown = ", ".join(f"{caller} to {called}" for caller, called in lost[:4])
        more = " ..." if len(lost) > 4 else ""
        verb = "measured" if check == "bandwidth" else "called"
        nodes = dict.fromkeys(itertools.chain(*lost))
        yield _build_gap_finding(check, f"the way from {shown}{more} was not {verb}", nodes)


def _is_measured(tries: Sequence[Mapping[str, object]]) -> bool:
    return any(attempt.get("mbit_s") or attempt.get("broken") for attempt in tries)


def _by_reason(check: str, whys: Mapping[str, str]) -> Iterator[Finding]:
    for why in dict.fromkeys(whys.values()):
        nodes = [name for name, text in whys.items() if text == why]
        yield _build_gap_finding(check, f"{', '.join(nodes)}: {why}", nodes)


def _build_gap_finding(check: str, why: str, nodes: Iterable[str]) -> Finding:
    return Finding(check=check, status="skip", nodes=tuple(nodes), summary=why, missing=True)


def _build_skip_finding(check: str, why: str) -> Finding:
    return Finding(check=check, status="skip", summary=why)
