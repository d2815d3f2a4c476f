"""Diagnosis of all findings in the logs: one cause, its consequences, and the nodes to look at. Pure.

There are three verdicts: the failure is explained; the job failed for an unknown reason; the logs have no failure.
Candidates are ranked in this order: definite causes, causes that only a library reports, ends of processes and texts
with several causes, warnings and survived errors, consequences, messages of launchers after an error. Among equal
candidates, a launcher's own "first observed failure" comes first, then the earliest.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtctl.doctor.explain import signatures
from dtctl.doctor.explain.confidence import compute_confidence, say_again
from dtctl.doctor.explain.consequences import in_one_run, told_as_consequence, without_errors_that_are_here
from dtctl.doctor.explain.diagnosis import UNKNOWN, Diagnosis, Evidence, Explanation, Verdict
from dtctl.doctor.explain.dumps import FlightRecorderDump, judge_dumps, read_dump
from dtctl.doctor.explain.lines import LogLine, render_terminal_line
from dtctl.doctor.explain.log_findings import LogFindings, LogSource, SignatureMatch
from dtctl.doctor.explain.log_scan import collect_log_hits
from dtctl.doctor.explain.read import (
    JobNodeMap,
    UnreadFile,
    dump_files,
    log_files,
    read_job_node_map,
    read_log_sources,
    read_run_end,
    read_run_records,
)
from dtctl.doctor.explain.refine import apply_collective_verdict, refine_diagnosis
from dtctl.doctor.explain.timeline import (
    AFTERWARDS,
    DEFINITE,
    EFFECT,
    LIKELY,
    NOTE,
    OPEN,
    REFUTED,
    SURVIVED,
    VAGUE,
    WARNED,
    CauseCandidate,
    build_hit_sort_key,
    error_before,
    is_before,
    is_earliest,
    own_complaints,
    rank_candidates,
)
from dtctl.launch.records.host_names import HostNames

MAX_EVIDENCE = 4
LONGEST_MESSAGE = 240
"""Most characters of an exception that a cause shows."""
_AGENT_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
"""Signals with which the agent ends the other workers after the first failure."""
DUMPS_SOURCE = "https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"
_BY_WATCHDOG = ("watchdog-timeout", "rank-behind", "rank-silent", "collective-mismatch")
_SCHEDULER = ("time-limit", "cancelled", "preempted", "requeued", "node-failed", "oom-killer", "job-memory-limit")
_AWAITED = ("store-barrier", "name-resolution", "store-unreachable", "connect-refused", "no-route", "loss-scale")
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


def diagnose_log_files(paths: Sequence[Path]) -> list[Diagnosis]:
    """Return the diagnoses of a job from its logs, the primary cause first; none is primary without a failure.

    Raises:
        UsageError: a path cannot be read.
    """
    return explain_all(paths).diagnoses


def explain_all(paths: Sequence[Path]) -> Explanation:
    """Return the verdict, the diagnoses, and the files that could not be read completely, with the reasons.

    Raises:
        UsageError: a path does not exist, or the system does not allow to read it.
    """
    unread: list[UnreadFile] = []
    layout = read_job_node_map(paths)
    dumps = [dump for file in dump_files(paths) if (dump := read_dump(file)) is not None]
    sources = itertools.chain(read_log_sources(log_files(paths, unread), unread), read_run_records(paths))
    verdict, found = _with_run_end(*_with_dumps(*diagnose(sources, layout), dumps, layout), paths)
    return Explanation(verdict=verdict, diagnoses=found, unread=unread)


def _with_run_end(verdict: Verdict, found: list[Diagnosis], paths: Sequence[Path]) -> tuple[Verdict, list[Diagnosis]]:
    """Correct the verdict by the end that the launcher has recorded: it has seen the exit codes of all workers."""
    recorded = read_run_end(paths)
    if recorded is None:
        return verdict, found
    end, file, line = recorded
    if end.status == "succeeded":
        return "no-failure", [replace(one, primary=False) for one in found]
    if end.status == "failed" and verdict == "no-failure":
        failed = end.first_failure.event_text if end.first_failure is not None else end.error or "no reason is recorded"
        cause = f"the run failed, and its logs do not show why; its record: {failed}"
        evidence = (Evidence(file=str(file), line=line, text=failed),)
        return "failed-unknown", [replace(UNKNOWN, primary=True, cause=cause, evidence=evidence), *found]
    return verdict, found


def _with_dumps(
    verdict: Verdict, found: list[Diagnosis], dumps: Sequence[FlightRecorderDump], layout: JobNodeMap
) -> tuple[Verdict, list[Diagnosis]]:
    """Add the verdict of flight recorders; they show late ranks better than watchdogs, but not why a program ended."""
    verdict_ = judge_dumps(dumps)
    if verdict_ is None:
        return verdict, found
    told = tuple(
        Evidence(file=dump.file, line=0, text=f"rank {dump.rank}: {dump.last}")
        for dump in sorted(dumps, key=lambda dump: dump.rank not in verdict_.ranks)[:MAX_EVIDENCE]
    )
    blamed = apply_collective_verdict(
        replace(UNKNOWN, primary=False, source=DUMPS_SOURCE, evidence=told), verdict_, layout.node_of
    )
    first = found[0] if found and found[0].primary else None
    if first is not None and first.confidence == "high" and first.id not in _BY_WATCHDOG:
        return verdict, [first, blamed, *found[1:]]
    rest = [replace(one, primary=False) for one in found if one.id != "unknown"]
    return "explained", [replace(blamed, primary=True), *rest]


def diagnose(sources: Iterable[LogSource], layout: JobNodeMap) -> tuple[Verdict, list[Diagnosis]]:
    """Return the verdict and the diagnoses of files that were read; see `explain_all`."""
    found = collect_log_hits(sources)
    _name_nodes(found, HostNames(layout.hosts))
    found.ranks |= set(layout.node_of)
    found.node_of = {**found.node_of, **layout.node_of}
    _settle_ranks(found.hits)
    groups: dict[tuple[str, str], list[SignatureMatch]] = {}
    many = len({hit.line.file for hit in found.hits}) > 1
    for hit in sorted(found.hits, key=lambda hit: build_hit_sort_key(hit, many)):
        groups.setdefault((hit.signature.id, _fill_placeholders(hit.signature.cause, hit.groups)), []).append(hit)
    roots = {hit.rank for hit in found.hits if hit.root}
    candidates = rank_candidates(_merge_hit_groups(groups), found, roots, many=many)
    diagnoses = [_build_diagnosis(one, found, layout) for one in candidates]
    if not _has_job_failed(found, candidates):
        return "no-failure", diagnoses
    if not candidates or not _is_failure_explained(candidates, found):
        return "failed-unknown", [_not_understood(found, candidates), *diagnoses]
    candidates, diagnoses = _named_first(candidates, diagnoses)
    cause, others = candidates[0], candidates[1:]
    first, combined = refine_diagnosis(_with_exit(diagnoses[0], cause.hits, found), cause, found)
    rivals = [one for one in others if one.place == DEFINITE and one.signature.id != cause.signature.id]
    earliest = bool(roots) or is_earliest(cause, rivals)
    confidence = compute_confidence(cause, found, rivals, earliest=earliest, combined=combined)
    first = replace(first, confidence=confidence, again=say_again(cause, confidence))
    if not first.nodes and len(found.nodes) == 1 and cause.signature.role in ("cause", "symptom"):
        first = replace(first, nodes=tuple(found.nodes))  # these are the logs of one node
    if not first.nodes and not first.ranks:
        first = replace(first, nodes=_told_of(found))
    first = replace(first, primary=True)
    rest: list[Diagnosis] = []
    for one in others:
        if left := without_errors_that_are_here(one.hits, found):
            left_ = CauseCandidate(left, one.place)
            told = _build_diagnosis(left_, found, layout)
            rest.append(told_as_consequence(told, left, first) if _is_later_consequence(left_, cause) else told)
    if cause.place in (EFFECT, AFTERWARDS, WARNED, REFUTED) and combined is None:
        return "failed-unknown", [_with_last_words(first, found), *rest]
    return "explained", [first, *rest]


def _is_failure_explained(candidates: list[CauseCandidate], found: LogFindings) -> bool:
    """Return whether the best candidate explains more than the end of a process or a survived error."""
    best = candidates[0]
    if best.place in (NOTE, SURVIVED, WARNED, REFUTED):
        ended = any(one.place in (EFFECT, AFTERWARDS) and not one.survived for one in candidates)
        return best.place != NOTE and (ended or _is_warning_repeated(best.hits, found))
    ends = best.place == AFTERWARDS or (best.place == EFFECT and best.signature.ends)
    return not ends or error_before(best.first, own_complaints(found)) is None


def _name_nodes(found: LogFindings, host_names: HostNames) -> None:
    """Replace the names of nodes in all findings by the names in the spec."""
    if not host_names.nodes:
        return
    for hit in (*found.hits, *found.complaints):
        hit.node = host_names.node_of(hit.node) if hit.node is not None else None
        named = {key: host_names.node_of(text) for key, text in hit.groups.items() if key in ("node", "head")}
        hit.groups = {key: host_names.replace_names(text) for key, text in hit.groups.items()} | named
        hit.line = replace(hit.line, text=host_names.replace_names(hit.line.text))  # a diagnosis may quote the line
        if hit.before is not None:
            hit.before = replace(hit.before, line=host_names.replace_names(hit.before.line))
    if found.last_said is not None:
        found.last_said = replace(found.last_said, line=host_names.replace_names(found.last_said.line))
    found.nodes = {host_names.node_of(node) for node in found.nodes}
    found.node_of = {rank: host_names.node_of(node) for rank, node in found.node_of.items()}


def _with_exit(first: Diagnosis, group: list[SignatureMatch], found: LogFindings) -> Diagnosis:
    """Add the rank and the node that a launcher reports, if the error itself has none, and a first failed rank."""
    if first.ranks and group[0].raised is not None and group[0].signature.blames == "self":
        named = {hit.rank for hit in found.hits if hit.raised is not None}
        silent = {hit.rank for hit in found.hits if hit.root and _names_failed_rank(hit)} - named - {None}
        return replace(first, ranks=tuple(sorted({*first.ranks, *(rank for rank in silent if rank is not None)})))
    if first.ranks or group[0].signature.blames != "self" or group[0].signature.role != "cause":
        return first
    ends = [hit for hit in found.hits if _names_failed_rank(hit)]
    ends = [hit for hit in ends if hit.root] or ends
    ranks: set[int] = set()
    for hit in ends:
        ranks.update(hit.ranks if hit.rank is None else (*hit.ranks, hit.rank))
    if len(ranks) != 1:
        return first
    nodes = {hit.node for hit in ends if hit.node is not None}
    return replace(first, ranks=tuple(ranks), nodes=first.nodes or tuple(sorted(nodes)))


def _names_failed_rank(hit: SignatureMatch) -> bool:
    """Return whether a launcher reports the rank of a process that no signal from outside has ended."""
    has_rank = hit.rank is not None or bool(hit.ranks)
    return has_rank and hit.end is not None and hit.end.signal not in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


def _told_of(found: LogFindings) -> tuple[str, ...]:
    """Return the nodes with a reported end of a process if they are few, for an error that names no node."""
    ends = [hit for hit in found.hits if hit.end is not None and not hit.survived]
    nodes = {hit.node for hit in ends if hit.node is not None}
    nodes = nodes or {hit.node for hit in (*found.hits, *found.complaints) if hit.node is not None and not hit.survived}
    return tuple(sorted(nodes)) if len(nodes) <= MAX_EVIDENCE else ()


def _named_first(
    candidates: list[CauseCandidate], diagnoses: list[Diagnosis]
) -> tuple[list[CauseCandidate], list[Diagnosis]]:
    """Move a candidate that explains the first one in front of it, even if the program only warned of it.

    For example, if a store was not reached because its name cannot be resolved, the name is the cause.
    """
    first = candidates[0].signature
    heads = {hit.groups.get("head") for hit in candidates[0].hits}
    store = first.id in ("store-unreachable", "rendezvous-host", "rendezvous-timeout")
    for number, one in enumerate(candidates):
        id_ = one.signature.id
        named = id_ == "name-resolution" and (heads & {hit.groups.get("node") for hit in one.hits} or heads == {None})
        warned = all(hit.warned and not hit.survived for hit in one.hits)
        if (store and named) or (warned and id_ in first.yields):
            order = [number, *(other for other in range(len(candidates)) if other != number)]
            return [candidates[i] for i in order], [diagnoses[i] for i in order]
    return candidates, diagnoses


def _settle_ranks(hits: list[SignatureMatch]) -> None:
    """Keep the most reliable of the ranks that launchers report.

    torchrun's table is preferred to local ranks, and both to Slurm's tasks, which are nodes under torchrun.
    """
    has_local_ranks = any(hit.end is not None and hit.end.local for hit in hits)
    roots = [hit for hit in hits if hit.root]
    has_table = bool(roots)
    is_first_killed = any(hit.end is not None and hit.end.signal in _AGENT_SIGNALS for hit in roots)
    for hit in hits:
        end = hit.end
        if end is None:
            continue
        is_killed = bool(end.ranks) and end.signal in _AGENT_SIGNALS
        if is_killed and has_table and not hit.root and not is_first_killed:
            # The agent ends the other workers after the first failure.
            hit.signature = signatures.by_id("worker-failed")
        is_task = hit.line.text.startswith("srun:")
        is_less_reliable = (is_task and (has_local_ranks or has_table)) or (end.local and has_table)
        if is_less_reliable:
            hit.rank, hit.ranks = None, ()


def _merge_hit_groups(groups: dict[tuple[str, str], list[SignatureMatch]]) -> list[list[SignatureMatch]]:
    """Return one group per id, but separate groups for different exceptions with the same id."""
    found: dict[object, list[SignatureMatch]] = {}
    for (id_, cause), hits in groups.items():
        generic = hits[0].raised is not None and hits[0].weight < 3
        found.setdefault((id_, cause) if generic else id_, []).extend(hits)
    return list(found.values())


def _has_job_failed(found: LogFindings, candidates: list[CauseCandidate]) -> bool:
    """Return whether a line shows that the job failed, other than a warning or a survived error."""
    if any(_is_warning_repeated(one.hits, found) for one in candidates):
        return True
    telling = (DEFINITE, LIKELY, OPEN, VAGUE, EFFECT, AFTERWARDS)
    return any(one.place in telling and not one.survived for one in candidates) or bool(
        _list_unsurvived_complaints(found)
    )


def _is_warning_repeated(group: list[SignatureMatch], found: LogFindings) -> bool:
    """Return whether a warning repeats until the log ends, since the program waits and does nothing else."""
    last = group[-1]
    return (
        len(group) >= 3
        and group[0].signature.id in _AWAITED
        and last.warned
        and not last.survived
        and last.line.number >= found.length.get(last.line.file, 0) - 3
    )


def _list_unsurvived_complaints(found: LogFindings) -> list[SignatureMatch]:
    return [hit for hit in found.complaints if not hit.survived]


def _is_later_consequence(one: CauseCandidate, cause: CauseCandidate) -> bool:
    """Return whether a candidate is a consequence of the cause, by its kind and because it is not printed earlier."""
    follows = one.place in (EFFECT, OPEN, AFTERWARDS) and not any(hit.survived for hit in cause.hits)
    return follows and in_one_run(cause.first, one.first) and not is_before(one.first, cause.first)


def _is_address(text: str) -> bool:
    return (text.count(".") == 3 and text.replace(".", "").isdigit()) or ":" in text


def _fill_placeholders(text: str, groups: dict[str, str]) -> str:
    for name, value in groups.items():
        text = text.replace(f"{{{name}}}", value)
    return _OPEN_PLACE.sub(lambda place: _NAMELESS.get(place[1], "it"), " ".join(text.split()))


@dataclass(slots=True)
class _BlamedPlaces:
    """Ranks and nodes that a diagnosis names."""

    ranks: set[int] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)


def _build_diagnosis(candidate: CauseCandidate, found: LogFindings, layout: JobNodeMap) -> Diagnosis:
    hits = candidate.hits
    signature = hits[0].signature
    places = _find_places(hits, found, layout)
    best = max(hits, key=lambda hit: (not hit.survived, not hit.bare, len(hit.groups)))
    cause = _format_cause(best, signature)
    survived = candidate.place in (SURVIVED, REFUTED)
    if survived:
        cause = f"{cause}; {_describe_recovery(hits)}"
    fix = _fill_placeholders(signature.fix, best.groups)
    if signature.ambiguous and signature.ambiguous not in fix:
        fix = f"ambiguous; rerun with {signature.ambiguous}; {fix}"
    return Diagnosis(
        id=signature.id,
        cause=cause,
        nodes=tuple(sorted(places.nodes)),
        ranks=tuple(sorted(places.ranks)),
        primary=False,
        confidence=compute_confidence(candidate, found),
        survived=survived,
        fix=fix,
        source=signature.source,
        evidence=_collect_evidence(hits),
    )


def _format_cause(best: SignatureMatch, signature: signatures.Signature) -> str:
    """Return the cause; an exception of the program adds its message if the signature's text does not have it."""
    cause = _fill_placeholders(signature.cause, best.groups)
    message = best.groups.get("text", "")
    has_message = "{text}" in signature.cause
    if not message or has_message or signature.role != "cause" or best.raised is None or best.weight < 2:
        return cause
    shown = message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + "…"
    return f"{cause}: {shown}"


def _find_places(hits: Sequence[SignatureMatch], found: LogFindings, layout: JobNodeMap) -> _BlamedPlaces:
    """Return the ranks and nodes that a group of hits blames; a process may blame itself or others."""
    signature = hits[0].signature
    places = _BlamedPlaces()
    if signature.blames == "self":
        places = _find_own_places(hits, found)
    elif signature.blames == "group":
        places = _find_named_places(hits)
    own_nodes = {hit.node for hit in hits if hit.node is not None}
    seen = {(hit.node, hit.rank) for hit in hits} - {(None, None)}
    if signature.blames == "all" and len(seen) == 1:  # the only node on which it was seen
        places.ranks |= {hit.rank for hit in hits if hit.rank is not None}
        places.nodes |= own_nodes
    if signature.id in _SCHEDULER and not places.nodes:
        places.nodes |= own_nodes
    places.nodes |= {found.node_of[rank] for rank in places.ranks if rank in found.node_of}
    for hit in hits:
        addresses = {hit.groups[key] for key in ("address", "head", "peer") if key in hit.groups}
        places.nodes |= {layout.address_of[address] for address in addresses & layout.address_of.keys()}
    return places


def _find_own_places(hits: Sequence[SignatureMatch], found: LogFindings) -> _BlamedPlaces:
    """Return the ranks and nodes of the processes that report the hits; a launcher that reports one comes first."""
    places = _BlamedPlaces()
    for hit in [hit for hit in hits if hit.root] or hits:
        if hit.rank is None and "rank" in hit.groups:
            hit.rank = int(hit.groups["rank"])
        if hit.rank is not None:
            places.ranks.add(hit.rank)
        places.ranks.update(hit.ranks)
        if hit.groups.get("other", "").isdigit():
            places.ranks.add(int(hit.groups["other"]))
        places.nodes |= _find_hit_nodes(hit, found)
    return places


def _find_named_places(hits: Sequence[SignatureMatch]) -> _BlamedPlaces:
    """Return the ranks and nodes that the texts of the hits name, else the nodes that reported them."""
    places = _BlamedPlaces()
    for hit in hits:
        words = f"{hit.groups.get('rank', '')} {hit.groups.get('ranks', '')}".replace(",", " ").split()
        places.ranks.update(map(int, words))
        if "node" in hit.groups:
            places.nodes.add(hit.groups["node"])
        if "head" in hit.groups and not _is_address(hit.groups["head"]):
            places.nodes.add(hit.groups["head"])
    if not places.nodes:
        places.nodes = {hit.node for hit in hits if hit.node is not None and hit.line.node is None}
    return places


def _describe_recovery(group: list[SignatureMatch]) -> str:
    return "the program was started again after it" if group[-1].restarted else "training went on after it"


def _collect_evidence(group: list[SignatureMatch]) -> tuple[Evidence, ...]:
    lines: dict[tuple[str, int], LogLine] = {}
    for hit in group:
        lines.setdefault((hit.line.file, hit.line.number), hit.line)
    return tuple(_build_evidence(line) for line in list(lines.values())[:MAX_EVIDENCE])


def _build_evidence(line: LogLine) -> Evidence:
    return Evidence(file=line.file, line=line.number, text=render_terminal_line(line.raw).strip()[:400])


def _not_understood(found: LogFindings, candidates: list[CauseCandidate]) -> Diagnosis:
    """Return a diagnosis without a cause, with the first error lines and the last line before the output stopped."""
    first = (
        _list_unsurvived_complaints(found)[:MAX_EVIDENCE]
        or [hit for hit in found.hits if not hit.survived][:MAX_EVIDENCE]
    )
    said = first[0].line.text.strip()[:200] if first else ""
    ended = [hit for one in candidates for hit in one.hits if hit.end is not None and not hit.survived]
    who = [hit for hit in (*first[:1], *ended) if hit.rank is not None or hit.node is not None][:1]
    diagnosis = replace(
        UNKNOWN,
        cause=f"the job failed for an unknown reason; the first error message is: {said}" if said else UNKNOWN.cause,
        ranks=tuple(hit.rank for hit in who if hit.rank is not None),
        nodes=tuple(hit.node for hit in who if hit.node is not None),
        evidence=_collect_evidence(first),
    )
    return _with_last_words(diagnosis, found)


def _with_last_words(diagnosis: Diagnosis, found: LogFindings) -> Diagnosis:
    said = next((hit.before for hit in found.hits if hit.before is not None), None) or found.last_said
    if said is None:
        return diagnosis
    return replace(diagnosis, cause=f"{diagnosis.cause}; the last line of the program before it: {said.line!r}")


def _find_hit_nodes(hit: SignatureMatch, found: LogFindings) -> set[str]:
    """Return the nodes of a hit by the names in the logs' paths; the host name counts if its rank has no such node."""
    ranks = hit.ranks if hit.rank is None else (hit.rank,)
    known = {found.node_of[rank] for rank in ranks if rank in found.node_of}
    return known or ({hit.node} if hit.node is not None else set())
