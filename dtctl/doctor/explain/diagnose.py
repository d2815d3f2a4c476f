"""Diagnosis: from all that was found in the logs to one cause, its consequences, and the nodes to look at. Pure.

There are three answers: what failed and why; that it failed, and why is not understood; no failure in these logs. A
definite cause beats one that a library only reports, that beats the end of a process and a text that has several
causes, that what a line itself calls a warning or what training has survived, and that a consequence. Among equals a
launcher's own "first observed failure" wins, then the earliest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from dtctl.doctor.explain import signatures
from dtctl.doctor.explain.confidence import weighed
from dtctl.doctor.explain.consequences import in_one_run, told_as_consequence, without_errors_that_are_here
from dtctl.doctor.explain.diagnosis import UNKNOWN, Confidence, Diagnosis, Evidence, Explanation, Verdict
from dtctl.doctor.explain.dumps import Dump, judge_dumps, read_dump
from dtctl.doctor.explain.found import Found, Hit, Source
from dtctl.doctor.explain.hits import collect
from dtctl.doctor.explain.lines import LogLine, shown
from dtctl.doctor.explain.read import LogLayout, Unread, dump_files, layout_of, log_files, read
from dtctl.doctor.explain.sharpen import blame, sharpen
from dtctl.launch.records.host_names import HostNames

MAX_EVIDENCE = 4
DUMPS_SOURCE = "https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"
_BY_WATCHDOG = ("watchdog-timeout", "rank-behind", "rank-silent", "collective-mismatch")
_SCHEDULER = ("time-limit", "cancelled", "preempted", "requeued", "node-failed", "oom-killer", "job-memory-limit")
_ENDING = ("time-limit", "cancelled", "preempted", "requeued")
_AWAITED = ("store-barrier", "name-resolution", "store-unreachable", "connect-refused", "no-route", "loss-scale")
_HUNG = ("watchdog-timeout", "gloo-timeout", "heartbeat-timeout", "watchdog-stuck", "monitored-barrier", "peer-late")
_OPEN_PLACE = re.compile(r"\{([a-z_]+)\}(?!\})")
_NAMELESS = {
    "path": "a file or folder",
    "node": "a node",
    "name": "a name",
    "why": "see the line",
    "where": "the line that its traceback names",
    "world": "the world size",
    "joined": "some",
    "interface": "a name",
    "version": "a newer version",
    "header": "a header",
}
_NEVER = float("inf")
DEFINITE, LIKELY, OPEN, VAGUE, WARNED, SURVIVED_PLACE, EFFECT, REFUTED, NOTE = range(9)


def explain(paths: Sequence[Path]) -> list[Diagnosis]:
    """Return the diagnoses of a job from its logs, the primary cause first; none is primary where nothing failed.

    Raises:
        UsageError: a path cannot be read.
    """
    return explain_all(paths).diagnoses


def explain_all(paths: Sequence[Path]) -> Explanation:
    """Return the verdict, the diagnoses, and the files that could not be read to their end, with the reasons.

    Raises:
        UsageError: a path does not exist, or the system does not let it be read.
    """
    unread: list[Unread] = []
    layout = layout_of(paths)
    dumps = [dump for file in dump_files(paths) if (dump := read_dump(file)) is not None]
    verdict, found = _with_dumps(*diagnose(read(log_files(paths, unread), unread), layout), dumps, layout)
    return Explanation(verdict=verdict, diagnoses=found, unread=unread)


def _with_dumps(
    verdict: Verdict, found: list[Diagnosis], dumps: Sequence[Dump], layout: LogLayout
) -> tuple[Verdict, list[Diagnosis]]:
    """Add what flight recorders say: they know who was late better than watchdogs do, and not why a program ended."""
    verdict_ = judge_dumps(dumps)
    if verdict_ is None:
        return verdict, found
    told = tuple(
        Evidence(file=dump.file, line=0, text=f"rank {dump.rank}: {dump.last}")
        for dump in sorted(dumps, key=lambda dump: dump.rank not in verdict_.ranks)[:MAX_EVIDENCE]
    )
    blamed = blame(replace(UNKNOWN, primary=False, source=DUMPS_SOURCE, evidence=told), verdict_, layout.node_of)
    first = found[0] if found and found[0].primary else None
    if first is not None and first.confidence == "high" and first.id not in _BY_WATCHDOG:
        return verdict, [first, blamed, *found[1:]]
    rest = [replace(one, primary=False) for one in found if one.id != "unknown"]
    return "explained", [replace(blamed, primary=True), *rest]


def diagnose(sources: Iterable[Source], layout: LogLayout) -> tuple[Verdict, list[Diagnosis]]:
    """Return what `explain_all` returns, of files that were read."""
    found = collect(sources)
    _name_nodes(found, HostNames(layout.hosts))
    found.ranks |= set(layout.node_of)
    found.node_of = {**found.node_of, **layout.node_of}
    _settle_ranks(found.hits)
    groups: dict[tuple[str, str], list[Hit]] = {}
    many = len({hit.line.file for hit in found.hits}) > 1
    for hit in sorted(found.hits, key=lambda hit: _when(hit, many)):
        groups.setdefault((hit.signature.id, _fill(hit.signature.cause, hit.groups)), []).append(hit)
    roots = {hit.rank for hit in found.hits if hit.root}
    known = {hit.signature.id for hit in found.hits if not hit.survived}
    merged = _merged(groups)
    hung = [hit for group in merged for hit in group if hit.signature.id in _HUNG and not hit.survived]
    late = {
        group[0].signature.id
        for group in merged
        if group[0].signature.id in _ENDING and hung and _when(hung[0], many) < _when(group[0], many)
    }
    # What the scheduler ended had hung before.
    ordered = sorted(merged, key=lambda group: (group[0].signature.id in late, *_order(group, roots, known, many=many)))
    diagnoses = [_diagnosis(group, found, layout, known) for group in ordered]
    if not _failed(found, ordered, known):
        return "no-failure", diagnoses
    if not ordered:
        return "failed-unknown", [_not_understood(found)]
    place = _place(ordered[0], known)
    ended = any(_place(group, known) == EFFECT and not all(hit.survived for hit in group) for group in ordered)
    if place == NOTE or (place in (SURVIVED_PLACE, WARNED, REFUTED) and not ended and not _insists(ordered[0], found)):
        return "failed-unknown", [_not_understood(found), *diagnoses]
    ordered, diagnoses = _named_first(ordered, diagnoses)
    first = sharpen(_with_exit(diagnoses[0], ordered[0], found), ordered[0], found)
    rivals = [
        group
        for group in ordered[1:]
        if _place(group, known) == DEFINITE and group[0].signature.id != ordered[0][0].signature.id
    ]
    earliest = bool(roots) or _earlier(ordered[0], rivals, many)
    first = replace(first, confidence=weighed(ordered[0], rivals, found, first.confidence, earliest=earliest))
    if not first.nodes and len(found.nodes) == 1 and ordered[0][0].signature.role in ("cause", "symptom"):
        first = replace(first, nodes=tuple(found.nodes))  # these are the logs of one node
    if not first.nodes and not first.ranks:
        first = replace(first, nodes=_told_of(found))
    first = replace(first, primary=True)
    rest: list[Diagnosis] = []
    for group in ordered[1:]:
        if left := without_errors_that_are_here(group, found):
            one = _diagnosis(left, found, layout, known)
            rest.append(told_as_consequence(one, left, first) if _follows(left, ordered[0], known) else one)
    verdict: Verdict = "failed-unknown" if first.confidence in ("low", "unknown") else "explained"
    if verdict == "failed-unknown":
        first = _with_last_words(first, found)
    return verdict, [first, *rest]


def _name_nodes(found: Found, host_names: HostNames) -> None:
    """Call nodes as the spec does in all that is told of them."""
    if not host_names.nodes:
        return
    for hit in (*found.hits, *found.complaints):
        hit.node = host_names.node_of(hit.node) if hit.node is not None else None
        named = {key: host_names.node_of(text) for key, text in hit.groups.items() if key in ("node", "head")}
        hit.groups = {key: host_names.replace_names(text) for key, text in hit.groups.items()} | named
        hit.line = replace(hit.line, text=host_names.replace_names(hit.line.text))  # which may be quoted
        if hit.before is not None:
            hit.before = replace(hit.before, line=host_names.replace_names(hit.before.line))
    if found.last_said is not None:
        found.last_said = replace(found.last_said, line=host_names.replace_names(found.last_said.line))
    found.nodes = {host_names.node_of(node) for node in found.nodes}
    found.node_of = {rank: host_names.node_of(node) for rank, node in found.node_of.items()}


def _with_exit(first: Diagnosis, group: list[Hit], found: Found) -> Diagnosis:
    """Add the rank and the node that a launcher names, where the error itself does not tell whose it is."""
    if first.ranks or group[0].signature.blames != "self" or group[0].signature.role != "cause":
        return first
    ends = [
        hit
        for hit in found.hits
        if hit.end is not None and hit.end.signal not in (15, 2, 9) and (hit.rank is not None or hit.ranks)
    ]
    ends = [hit for hit in ends if hit.root] or ends
    ranks = {rank for hit in ends for rank in (*hit.ranks, *(() if hit.rank is None else (hit.rank,)))}
    if len(ranks) != 1:
        return first
    nodes = {hit.node for hit in ends if hit.node is not None}
    return replace(first, ranks=tuple(ranks), nodes=tuple(sorted(nodes)) if not first.nodes else first.nodes)


def _told_of(found: Found) -> tuple[str, ...]:
    """Return the few nodes on which anything is said to have ended, where the error itself names none."""
    ends = [hit for hit in found.hits if hit.end is not None and not hit.survived]
    nodes = {hit.node for hit in ends if hit.node is not None}
    nodes = nodes or {hit.node for hit in (*found.hits, *found.complaints) if hit.node is not None and not hit.survived}
    return tuple(sorted(nodes)) if len(nodes) <= MAX_EVIDENCE else ()


def _named_first(ordered: list[list[Hit]], diagnoses: list[Diagnosis]) -> tuple[list[list[Hit]], list[Diagnosis]]:
    """Put what the first yields to before it, although the program only warned of it.

    Of a store that nobody reached since its name means nothing, for example, the name is the cause.
    """
    first = ordered[0][0].signature
    heads = {hit.groups.get("head") for hit in ordered[0]}
    store = first.id in ("store-unreachable", "rendezvous-host", "rendezvous-timeout")
    for number, group in enumerate(ordered):
        id_ = group[0].signature.id
        named = id_ == "name-resolution" and (heads & {hit.groups.get("node") for hit in group} or heads == {None})
        warned = all(hit.warned and not hit.survived for hit in group)
        if (store and named) or (warned and id_ in first.yields):
            order = [number, *(other for other in range(len(ordered)) if other != number)]
            return [ordered[i] for i in order], [diagnoses[i] for i in order]
    return ordered, diagnoses


def _settle_ranks(hits: list[Hit]) -> None:
    """Keep the best of the ways in which launchers tell ranks.

    torchrun's table comes before local ranks, and both before Slurm's tasks, which are nodes under torchrun.
    """
    torchrun = any(hit.end is not None and hit.end.local for hit in hits)
    table = any(hit.root for hit in hits)
    first = any(hit.root and hit.end is not None and hit.end.signal in (9, 15) for hit in hits)
    for hit in hits:
        if hit.end is None:
            continue
        if table and not hit.root and hit.end.ranks and hit.end.signal in (9, 15) and not first:
            hit.signature = signatures.by_id("worker-failed")  # the agent ends the others after the first failure
        srun = hit.line.text.startswith("srun:")
        if (srun and (torchrun or table)) or (hit.end.local and table):
            hit.rank, hit.ranks = None, ()


def _merged(groups: dict[tuple[str, str], list[Hit]]) -> list[list[Hit]]:
    """Return one group for each id, but for exceptions, of which several may be told apart."""
    found: dict[object, list[Hit]] = {}
    for (id_, cause), hits in groups.items():
        generic = hits[0].raised is not None and hits[0].weight < 3
        found.setdefault((id_, cause) if generic else id_, []).extend(hits)
    return list(found.values())


def _failed(found: Found, groups: list[list[Hit]], known: set[str]) -> bool:
    """Return whether anything says that the job failed, and is not only a warning, or a complaint that was survived."""
    if any(_insists(group, found) for group in groups):
        return True
    if any(
        _place(group, known) in (DEFINITE, LIKELY, OPEN, VAGUE, EFFECT) and not all(hit.survived for hit in group)
        for group in groups
    ):
        return True
    return bool(_complaints(found))


def _insists(group: list[Hit], found: Found) -> bool:
    """Return whether a warning is repeated until the log ends: it is waited for, and nothing else happens."""
    last = group[-1]
    return (
        len(group) >= 3
        and group[0].signature.id in _AWAITED
        and last.warned
        and not last.survived
        and last.line.number >= found.length.get(last.line.file, 0) - 3
    )


def _complaints(found: Found) -> list[Hit]:
    return [hit for hit in found.complaints if not hit.survived]


def _when(hit: Hit, many: bool) -> tuple[float, int]:
    """Return the key for sorting: the time where several files are compared, the place within one."""
    return (hit.time if many and hit.time is not None else _NEVER if many else 0.0, hit.order)


def _order(
    group: list[Hit], roots: set[int | None], known: set[str], *, many: bool
) -> tuple[int, bool, tuple[float, int]]:
    not_root = bool(roots) and not any(hit.rank in roots or roots & set(hit.ranks) for hit in group)
    place = _place(group, known)
    told_to = group[0].signature.id == "stopped"  # what another failure led to, even if it is told first
    return (LIKELY if place == OPEN else place, told_to or not_root, _when(group[0], many))


def _place(group: list[Hit], known: set[str]) -> int:
    """Return what a group is worth beside the others; `known` are the ids of what was found and not survived."""
    signature = group[0].signature
    if signature.role == "note" or (signature.role == "effect" and all(hit.warned or hit.survived for hit in group)):
        return NOTE
    if signature.role == "effect":
        return EFFECT
    if all(hit.survived for hit in group):
        mentioned = all(hit.warned or hit.weight == 0 for hit in group)
        return REFUTED if mentioned else SURVIVED_PLACE
    if all(hit.warned or hit.survived for hit in group):
        return WARNED
    if signature.role == "symptom" or signature.ambiguous:
        return OPEN
    if known & set(signature.yields):
        return VAGUE
    if max(hit.weight for hit in group) < 1:
        return LIKELY
    return DEFINITE


def _earlier(group: list[Hit], rivals: list[list[Hit]], many: bool) -> bool:
    """Return whether a group is certainly earlier than all of the others: by times, or in one file."""
    first = group[0]
    for rival in rivals:
        other = rival[0]
        if other.line.file != first.line.file and (
            first.time is None or other.time is None or first.time >= other.time
        ):
            return False
        if other.line.file == first.line.file and _when(first, many) >= _when(other, many):
            return False
    return True


def _follows(group: list[Hit], first: list[Hit], known: set[str]) -> bool:
    """Return whether a group is a consequence of the first: its text says so, and it does not stand before it."""
    place = _place(group, known)
    one, other = first[0], group[0]
    if place not in (EFFECT, OPEN) or any(hit.survived for hit in first) or not in_one_run(one, other):
        return False
    if one.line.file == other.line.file:
        return other.order >= one.order
    return one.time is None or other.time is None or other.time >= one.time


def _is_address(text: str) -> bool:
    return (text.count(".") == 3 and text.replace(".", "").isdigit()) or ":" in text


def _fill(text: str, groups: dict[str, str]) -> str:
    for name, value in groups.items():
        text = text.replace(f"{{{name}}}", value)
    return _OPEN_PLACE.sub(lambda place: _NAMELESS.get(place[1], "it"), " ".join(text.split()))


def _diagnosis(group: list[Hit], found: Found, layout: LogLayout, known: set[str]) -> Diagnosis:
    signature = group[0].signature
    ranks: set[int] = set()
    nodes: set[str] = set()
    counted = group
    if any(hit.root for hit in group):  # the launcher itself says whose was the first
        counted = [hit for hit in group if hit.root]
    if signature.blames == "self":
        for hit in counted:
            if hit.rank is None and "rank" in hit.groups:
                hit.rank = int(hit.groups["rank"])
        ranks = {hit.rank for hit in counted if hit.rank is not None} | {rank for hit in counted for rank in hit.ranks}
        ranks |= {int(hit.groups["other"]) for hit in counted if hit.groups.get("other", "").isdigit()}
        nodes = {node for hit in counted for node in _nodes_of(hit, found)}
    elif signature.blames == "group":
        for hit in group:
            words = (hit.groups.get("rank", "") + " " + hit.groups.get("ranks", "")).replace(",", " ").split()
            ranks |= {int(word) for word in words}
            nodes |= {hit.groups["node"]} if "node" in hit.groups else set()
            nodes |= {hit.groups["head"]} if "head" in hit.groups and not _is_address(hit.groups["head"]) else set()
        nodes = nodes or {hit.node for hit in group if hit.node is not None and hit.line.node is None}
    seen = {(hit.node, hit.rank) for hit in group} - {(None, None)}
    if signature.blames == "all" and len(seen) == 1:  # where it was seen
        ranks |= {hit.rank for hit in group if hit.rank is not None}
        nodes |= {hit.node for hit in group if hit.node is not None}
    if signature.id in _SCHEDULER and not nodes:
        nodes |= {hit.node for hit in group if hit.node is not None}
    nodes |= {found.node_of[rank] for rank in ranks if rank in found.node_of}
    nodes |= {layout.address_of[hit.groups[key]] for hit in group for key in ("address", "head", "peer")
              if hit.groups.get(key) in layout.address_of}  # fmt: skip
    place = _place(group, known)
    best = max(group, key=lambda hit: (not hit.survived, not hit.bare, len(hit.groups)))
    cause = _fill(signature.cause, best.groups)
    fix = _fill(signature.fix, best.groups)
    if best.raised is not None and best.weight >= 2 and "{text}" not in signature.cause and signature.role == "cause":
        said = best.groups.get("text", "")
        cause = f"{cause}: {said if len(said) <= 240 else said[:240] + '…'}" if said else cause
    if signature.ambiguous and signature.ambiguous not in fix:
        fix = f"ambiguous; rerun with {signature.ambiguous}; {fix}"
    return Diagnosis(
        id=signature.id,
        cause=f"{cause}; {_after(group)}" if place in (SURVIVED_PLACE, REFUTED) else cause,
        nodes=tuple(sorted(nodes)),
        ranks=tuple(sorted(ranks)),
        primary=False,
        confidence=_confidence(group, place),
        survived=place in (SURVIVED_PLACE, REFUTED),
        fix=fix,
        source=signature.source,
        evidence=_evidences(group),
    )


def _after(group: list[Hit]) -> str:
    return "the program was started again after it" if group[-1].restarted else "training went on after it"


def _confidence(group: list[Hit], place: int) -> Confidence:
    if place == OPEN and group[0].signature.ambiguous:
        return "ambiguous"
    if place in (EFFECT, NOTE, WARNED, REFUTED):
        return "low"
    if place != DEFINITE or not group[0].signature.sure or group[0].signature.yields:
        return "medium"
    if all(hit.weight == 2 for hit in group):  # of a kind, by its structure alone
        return "medium"
    generic = all(hit.raised is not None and (hit.bare or not hit.raised.frames) and hit.weight < 3 for hit in group)
    return "medium" if generic else "high"


def _evidences(group: list[Hit]) -> tuple[Evidence, ...]:
    lines: dict[tuple[str, int], LogLine] = {}
    for hit in group:
        lines.setdefault((hit.line.file, hit.line.number), hit.line)
    return tuple(_evidence(line) for line in list(lines.values())[:MAX_EVIDENCE])


def _evidence(line: LogLine) -> Evidence:
    return Evidence(file=line.file, line=line.number, text=shown(line.raw).strip()[:400])


def _not_understood(found: Found) -> Diagnosis:
    """Return that the job failed, with the first lines that complain and the last line before the silence."""
    first = _complaints(found)[:MAX_EVIDENCE] or [hit for hit in found.hits if not hit.survived][:MAX_EVIDENCE]
    said = first[0].line.text.strip()[:200] if first else ""
    diagnosis = replace(
        UNKNOWN,
        cause=f"the job failed, and why is not understood; the first complaint is: {said}" if said else UNKNOWN.cause,
        ranks=tuple(sorted({hit.rank for hit in first[:1] if hit.rank is not None})),
        nodes=tuple(sorted({hit.node for hit in first[:1] if hit.node is not None})),
        evidence=_evidences(first),
    )
    return _with_last_words(diagnosis, found)


def _with_last_words(diagnosis: Diagnosis, found: Found) -> Diagnosis:
    said = next((hit.before for hit in found.hits if hit.before is not None), None) or found.last_said
    if said is None:
        return diagnosis
    return replace(diagnosis, cause=f"{diagnosis.cause}; the last line of the program before it: {said.line!r}")


def _nodes_of(hit: Hit, found: Found) -> set[str]:
    """Nodes of a hit by the names that logs are kept under; a host's own name only if its rank has no such node."""
    ranks = hit.ranks if hit.rank is None else (hit.rank,)
    known = {found.node_of[rank] for rank in ranks if rank in found.node_of}
    return known or ({hit.node} if hit.node is not None else set())
