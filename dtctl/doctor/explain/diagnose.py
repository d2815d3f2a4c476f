"""From what was found in the logs to one cause, its consequences, and whom to look at. Pure.

A cause beats a text that cannot tell between several, and that beats what training has survived, and that a
consequence; among equals the earliest wins, torchrun's own "first observed failure" before the rest. Where no text is
known, or all that is known was survived, the answer is `unknown`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dtctl.doctor.explain import collective
from dtctl.doctor.explain.dumps import Dump, judge_dumps, read_dump
from dtctl.doctor.explain.hits import Hit, collect
from dtctl.doctor.explain.lines import LogLine, shown
from dtctl.doctor.explain.read import LogLayout, Unread, dump_files, layout_of, log_files, read

Confidence = Literal["high", "medium", "low", "ambiguous", "unknown"]
MAX_EVIDENCE = 4
DUMPS_SOURCE = "https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"
_BY_WATCHDOG = ("watchdog-timeout", "rank-behind", "rank-silent", "collective-mismatch")
_NEVER = float("inf")
_ROLES = {"cause": 0, "vague cause": 1, "bare": 2, "ambiguous": 3, "survived": 4, "effect": 5, "note": 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A line that a diagnosis rests on."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One thing that went wrong."""

    id: str
    cause: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    primary: bool
    confidence: Confidence
    fix: str
    source: str
    evidence: tuple[Evidence, ...]
    survived: bool = False
    """Whether training went on after it."""

    def as_json(self) -> dict[str, Any]:
        """As `dtctl doctor --log --json` prints it."""
        return asdict(self)


UNKNOWN = Diagnosis(
    id="unknown",
    cause="nothing in these logs is known to dtctl",
    nodes=(),
    ranks=(),
    primary=True,
    confidence="unknown",
    fix="give the logs of all ranks, with what they printed on standard error; NCCL_DEBUG=WARN makes NCCL speak",
    source="",
    evidence=(),
)


SURVIVED = replace(UNKNOWN, cause="training went on after every error in these logs")


def explain(paths: Sequence[Path]) -> list[Diagnosis]:
    """Why the job whose logs these are has failed, the primary cause first.

    Raises:
        UsageError: a path cannot be read.
    """
    return explain_all(paths)[0]


def explain_all(paths: Sequence[Path]) -> tuple[list[Diagnosis], list[Unread]]:
    """As `explain`, and which files could not be read, or not to their end, and why.

    Raises:
        UsageError: a path does not exist, or the system does not let it be read.
    """
    unread: list[Unread] = []
    lines = read(log_files(paths), unread)
    layout = layout_of(paths)
    dumps = [dump for file in dump_files(paths) if (dump := read_dump(file)) is not None]
    return _with_dumps(diagnose(lines, layout), dumps, layout), unread


def _with_dumps(found: list[Diagnosis], dumps: Sequence[Dump], layout: LogLayout) -> list[Diagnosis]:
    """Add what flight recorders say: they know who was late better than watchdogs do, and not why a program ended."""
    verdict = judge_dumps(dumps)
    if verdict is None:
        return found
    told = tuple(
        Evidence(file=dump.file, line=0, text=f"rank {dump.rank}: {dump.last}")
        for dump in sorted(dumps, key=lambda dump: dump.rank not in verdict.ranks)[:MAX_EVIDENCE]
    )
    blamed = _blame(replace(UNKNOWN, primary=False, source=DUMPS_SOURCE, evidence=told), verdict, layout.node_of)
    first, *rest = found
    if first.confidence == "high" and first.id not in _BY_WATCHDOG:
        return [first, blamed, *rest]
    return [replace(blamed, primary=True), *(replace(one, primary=False) for one in found if one.id != "unknown")]


def diagnose(lines: Iterable[LogLine], layout: LogLayout) -> list[Diagnosis]:
    """As `explain`, of lines."""
    watching: list[LogLine] = []
    hits, ranks, node_of = collect(_noting(lines, watching))
    ranks |= set(layout.node_of)
    node_of = {**node_of, **layout.node_of}
    groups: dict[tuple[str, str], list[Hit]] = {}
    for hit in sorted(hits, key=lambda hit: hit.time if hit.time is not None else _NEVER):
        groups.setdefault((hit.signature.id, _fill(hit.signature.cause, hit.groups)), []).append(hit)
    if not groups:
        return [UNKNOWN]
    roots = {hit.rank for hit in hits if hit.root}
    known = {hit.signature.id for hit in hits if not hit.survived}
    ordered = sorted(groups.values(), key=lambda group: _order(group, roots, known))
    found = [_diagnosis(group, node_of, layout) for group in ordered]
    if all(_role(hit) == "note" for hit in hits):
        return [UNKNOWN, *found]
    if all(hit.survived or _role(hit) == "note" for hit in hits):
        return [SURVIVED, *found]
    found[0] = _sharpen(found[0], hits, watching, ranks, node_of)
    return [replace(found[0], primary=True), *found[1:]]


def _noting(lines: Iterable[LogLine], watching: list[LogLine]) -> Iterator[LogLine]:
    """The lines, of which those that a watchdog may have printed are kept: a log may be long."""
    for line in lines:
        if "work" in line.text or "WorkNCCL" in line.text:
            watching.append(line)
        yield line


def hits_of(id_: str, hits: Iterable[Hit]) -> list[Hit]:
    """The hits of one signature."""
    return [hit for hit in hits if hit.signature.id == id_]


def _role(hit: Hit) -> str:
    return "ambiguous" if hit.signature.ambiguous else hit.signature.role


def _order(group: list[Hit], roots: set[int | None], known: set[str]) -> tuple[int, bool, float]:
    first = group[0]
    not_root = bool(roots) and not any(hit.rank in roots for hit in group)
    return (_ROLES[_place(group, known)], not_root, first.time if first.time is not None else _NEVER)


def _place(group: list[Hit], known: set[str]) -> str:
    """What a group is worth beside the others; `known` are the ids of what was found and not survived."""
    role = _role(group[0])
    if role in ("cause", "ambiguous") and all(hit.survived for hit in group):
        return "survived"
    if role == "cause" and all(hit.bare for hit in group):
        return "bare"
    return "vague cause" if role == "cause" and known & set(group[0].signature.yields) else role


def _fill(text: str, groups: dict[str, str]) -> str:
    for name, value in groups.items():
        text = text.replace(f"{{{name}}}", value)
    return " ".join(text.split())


def _diagnosis(group: list[Hit], node_of: dict[int, str], layout: LogLayout) -> Diagnosis:
    signature = group[0].signature
    ranks: set[int] = set()
    nodes: set[str] = set()
    if signature.blames == "self":
        ranks = {hit.rank for hit in group if hit.rank is not None}
        nodes = {hit.node for hit in group if hit.node is not None}
    elif signature.blames == "group":
        for hit in group:
            words = (hit.groups.get("rank", "") + " " + hit.groups.get("ranks", "")).replace(",", " ").split()
            ranks |= {int(word) for word in words}
            nodes |= {hit.groups["node"]} if "node" in hit.groups else set()
    nodes |= {node_of[rank] for rank in ranks if rank in node_of}
    nodes |= {layout.address_of[hit.groups[key]] for hit in group for key in ("address", "head", "peer")
              if hit.groups.get(key) in layout.address_of}  # fmt: skip
    confidence: dict[str, Confidence] = {
        "cause": "high", "bare": "medium", "ambiguous": "ambiguous", "survived": "medium", "effect": "low",
        "note": "low",
    }  # fmt: skip
    place = _place(group, set())
    cause = _fill(signature.cause, group[0].groups)
    fix = _fill(signature.fix, group[0].groups)
    if signature.ambiguous and signature.ambiguous not in fix:
        fix = f"ambiguous; rerun with {signature.ambiguous}; {fix}"
    return Diagnosis(
        id=signature.id,
        cause=f"{cause}; training went on after it" if place == "survived" else cause,
        nodes=tuple(sorted(nodes)),
        ranks=tuple(sorted(ranks)),
        primary=False,
        confidence=confidence[place],
        survived=place == "survived",
        fix=fix,
        source=signature.source,
        evidence=tuple(_evidence(hit.line) for hit in group[:MAX_EVIDENCE]),
    )


def _evidence(line: LogLine) -> Evidence:
    return Evidence(file=line.file, line=line.number, text=shown(line.raw).strip()[:400])


def _sharpen(
    found: Diagnosis, hits: list[Hit], watching: Sequence[LogLine], ranks: set[int], node_of: dict[int, str]
) -> Diagnosis:
    """Say more about a primary cause that cannot be told from one line alone, by comparing the ranks."""
    if found.id == "watchdog-timeout":
        verdict = collective.judge(watching, ranks)
        if verdict is not None:
            return _blame(found, verdict, node_of)
    if found.id == "gloo-timeout" and {hit.groups.get("way") for hit in hits_of("gloo-timeout", hits)} >= {
        "send",
        "recv",
    }:
        # Ranks that call different collectives look the same (kept as own-wrong-order.log), so this stays ambiguous.
        return replace(
            found,
            cause="one rank cannot send and another waits for it: large packets are lost between them (MTU), or the "
            "ranks called different collectives",
            fix="`dtctl doctor` tests large packets on every pair; else rerun with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        )
    if found.confidence == "low":
        complained = {hit.rank for hit in hits if hit.rank is not None}
        silent = sorted(ranks - complained)
        if complained and silent and len(silent) <= len(ranks) / 2:
            return replace(
                found,
                ranks=tuple(silent),
                nodes=_nodes(silent, node_of),
                confidence="medium",
                cause=f"{_ranks(silent)} ended without a word and the others lost the connection to it",
            )
    return found


def _blame(found: Diagnosis, verdict: collective.CollectiveVerdict, node_of: dict[int, str]) -> Diagnosis:
    who = _ranks(verdict.ranks)
    blamed = replace(found, ranks=verdict.ranks, nodes=_nodes(verdict.ranks, node_of), confidence="high")
    if verdict.kind == "mismatch":
        return replace(
            blamed,
            id="collective-mismatch",
            cause=f"the ranks called different collectives: {verdict.said}",
            fix="let every rank call the same collectives in the same order; look for calls under `if rank == 0`, "
            "early exits and batches of different shape",
        )
    return replace(
        blamed,
        id="rank-behind" if verdict.kind == "behind" else "rank-silent",
        cause=f"{who} kept the others waiting: {verdict.said}",
        fix=f"see in the log of {who} what it was doing; while it hangs, py-spy dump --pid PID shows it",
        confidence="high" if verdict.kind == "behind" else "medium",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(str(rank) for rank in ranks)}"


def _nodes(ranks: Iterable[int], node_of: dict[int, str]) -> tuple[str, ...]:
    return tuple(sorted({node_of[rank] for rank in ranks if rank in node_of}))
