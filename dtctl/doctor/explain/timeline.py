"""Candidates for the cause of a failure, with what each was printed by and after. Pure.

A line has a process, a time or a place in its file, and a voice: the program, a library, a traceback, a launcher or
scheduler, or the kernel. What launchers and schedulers print about the end of a job never outranks an error that was
printed before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dtctl.doctor.explain.found import Found, Hit
from dtctl.doctor.explain.signatures import Signature

Voice = Literal["program", "library", "traceback", "launcher", "kernel"]
DEFINITE, LIKELY, OPEN, VAGUE, WARNED, SURVIVED, EFFECT, AFTERWARDS, REFUTED, NOTE = range(10)
"""Places of candidates, the best first."""
_KERNEL = re.compile(r"\bkernel: |\bNVRM: |oom[-_]kill|Out of memory: Killed process|\bXid\b")
_LAUNCHER = re.compile(
    r"\b(?:srun|slurmstepd|slurmctld|sbatch|salloc|mpirun|mpiexec|prterun|orted|torchrun|horovodrun|pdsh|kubelet)\b\S*:|"
    r"torch/distributed/(?:elastic|run|launch)|torch\.distributed\.(?:elastic|run|launch)|\blauncher\b|closing signal|"
    r"\bpyxis\b|\benroot\b|OCI runtime|docker:"
)
_LIBRARY = re.compile(
    r"NCCL (?:WARN|INFO)|\[[EFW]\d{3,4} |\[c10d\]|ProcessGroup|gloo/|\[E |\bUCX\b|libfabric|terminate called|"
    r"what\(\):|^frame #"
)
PEER_LOST = frozenset(
    ("peer-closed", "peer-closed-store", "remote-error", "connect-refused", "nccl-id-missing", "watchdog-follow-up",
     "derived", "worker-failed", "torchrun-no-traceback", "worker-exit", "worker-lost", "ib-flushed", "traceback-cut")
)  # fmt: skip
"""Kinds of errors by which a process reports that another one has failed."""
_OF_AN_END = re.compile(
    r"(?i)exit ?code|child process|(?:container|process) (?:has )?(?:failed|exited|died)|launch error"
)
"""A complaint that a process has ended, in words of a launcher."""
LATE_S = 1.0
"""Seconds by which the clock of one machine may be behind that of another."""
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One cause with the lines that show it, the earliest first."""

    hits: list[Hit]
    place: int

    @property
    def first(self) -> Hit:
        """The earliest line."""
        return self.hits[0]

    @property
    def signature(self) -> Signature:
        """Return the signature of all of the lines."""
        return self.hits[0].signature

    @property
    def survived(self) -> bool:
        """Return whether training continued after all of it."""
        return all(hit.survived for hit in self.hits)


def voice_of(hit: Hit) -> Voice:
    """Return the source of a finding: the kind of process that has printed it."""
    if hit.end is not None:
        return "launcher"
    if hit.raised is not None and not hit.bare:
        return "traceback"
    if _KERNEL.search(hit.line.raw):
        return "kernel"
    if _LAUNCHER.search(hit.line.raw):
        return "launcher"
    return "library" if _LIBRARY.search(hit.line.raw) else "program"


def when(hit: Hit, many: bool) -> tuple[float, int]:
    """Return the key for sorting: the time where several files are compared, the place within one."""
    return (hit.time if many and hit.time is not None else _NEVER if many else 0.0, hit.order)


def is_before(one: Hit, other: Hit) -> bool | None:
    """Return whether one line was printed before another; None if neither a file nor clocks show it."""
    if one.line.file == other.line.file:
        return one.order < other.order
    if one.time is None or other.time is None:
        return None
    return one.time < other.time - LATE_S


def rank_candidates(
    groups: Iterable[list[Hit]], found: Found, roots: set[int | None], *, many: bool
) -> list[Candidate]:
    """Return the candidates, the best one first.

    Args:
        groups: lines with the same meaning, the earliest first.
        found: all findings from the logs.
        roots: ranks that a launcher reports as the first to end.
        many: True if the lines are of several files.
    """
    known = {hit.signature.id for hit in found.hits if not hit.survived}
    errors = [hit for hit in found.hits if _is_error(hit)] + own_complaints(found)
    candidates = [Candidate(hits, _place(hits, known, errors)) for hits in groups]

    def key(one: Candidate) -> tuple[int, bool, tuple[float, int]]:
        not_root = bool(roots) and not any(hit.rank in roots or roots & set(hit.ranks) for hit in one.hits)
        told_to = one.signature.id == "stopped"  # a consequence of another failure, even if it is printed first
        place = LIKELY if one.place == OPEN else one.place
        return (place, told_to or not_root, when(one.first, many))

    return sorted(candidates, key=key)


def own_complaints(found: Found) -> list[Hit]:
    """Return the lines that complain in unknown words and were not survived, without those of launchers about ends."""
    return [
        hit
        for hit in found.complaints
        if not hit.survived and not _OF_AN_END.search(hit.line.raw) and voice_of(hit) != "launcher"
    ]


def error_before(hit: Hit, errors: Sequence[Hit]) -> Hit | None:
    """Return an error that was printed before what a launcher or scheduler printed about an end; None without one."""
    own_end = hit.end is not None and (hit.root or not hit.signature.ends)
    for error in errors:
        if error.signature.id == hit.signature.id:
            continue
        lost = error.signature.id in PEER_LOST
        if own_end and (lost or (error.rank is not None and hit.rank not in (None, error.rank))):
            continue  # one process crashed, and others printed that they lost it
        before = is_before(error, hit)
        if before or (before is None and not lost):
            return error
    return None


def _is_error(hit: Hit) -> bool:
    signature = hit.signature
    told = signature.ends or signature.role == "note" or hit.end is not None
    return not (told or hit.survived or hit.warned)


def _place(hits: Sequence[Hit], known: set[str], errors: Sequence[Hit]) -> int:
    """Return the place of a group; `known` are the ids of what was found and not survived."""
    signature = hits[0].signature
    if signature.role == "note" or (signature.role == "effect" and all(hit.warned or hit.survived for hit in hits)):
        return NOTE
    if all(hit.survived for hit in hits) and signature.role != "effect":
        return REFUTED if all(hit.warned or hit.weight == 0 for hit in hits) else SURVIVED
    if (signature.ends or hits[0].end is not None) and error_before(hits[0], errors) is not None:
        return AFTERWARDS
    if signature.role == "effect":
        return EFFECT
    if all(hit.warned or hit.survived for hit in hits):
        return WARNED
    if signature.role == "symptom" or signature.ambiguous:
        return OPEN
    if known & set(signature.yields):
        return VAGUE
    return LIKELY if max(hit.weight for hit in hits) < 1 else DEFINITE


def is_earliest(one: Candidate, rivals: Iterable[Candidate]) -> bool:
    """Return whether a candidate is certainly earlier than all of the others: by times, or in one file."""
    return all(is_before(one.first, rival.first) for rival in rivals)
