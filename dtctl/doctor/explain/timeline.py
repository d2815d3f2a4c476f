"""Candidates for the cause of a failure, ranked by their source and order. Pure.

A line has a process, a time or a position in its file, and a source (`Voice`): the program, a library, a traceback, a
launcher or scheduler, or the kernel. A message of a launcher or scheduler about the end of a job never outranks an
error that was printed before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dtctl.doctor.explain.log_findings import LogFindings, SignatureMatch
from dtctl.doctor.explain.signatures import Signature

Voice = Literal["program", "library", "traceback", "launcher", "kernel"]
DEFINITE, LIKELY, OPEN, VAGUE, WARNED, SURVIVED, EFFECT, AFTERWARDS, REFUTED, NOTE = range(10)
"""Places of candidates in the ranking, the best first."""
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
"""Pattern of a launcher's message about the end of a process."""
LATE_S = 1.0
"""Largest assumed difference between the clocks of two machines, in seconds."""
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class CauseCandidate:
    """Cause with the lines that show it, the earliest first."""

    hits: list[SignatureMatch]
    place: int

    @property
    def first(self) -> SignatureMatch:
        """Earliest line that shows the cause."""
        return self.hits[0]

    @property
    def signature(self) -> Signature:
        """Return the signature that all of the lines have."""
        return self.hits[0].signature

    @property
    def survived(self) -> bool:
        """Return whether training continued after all of the lines."""
        return all(hit.survived for hit in self.hits)


def classify_finding_source(hit: SignatureMatch) -> Voice:
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


def build_hit_sort_key(hit: SignatureMatch, many: bool) -> tuple[float, int]:
    """Return the key for sorting: the time if several files are compared, otherwise the position."""
    if not many:
        return 0.0, hit.order
    return _NEVER if hit.time is None else hit.time, hit.order


def is_before(one: SignatureMatch, other: SignatureMatch) -> bool | None:
    """Return whether one line was printed before another; None if neither file nor clocks show it."""
    if one.line.file == other.line.file:
        return one.order < other.order
    if one.time is None or other.time is None:
        return None
    return one.time < other.time - LATE_S


def rank_candidates(
    groups: Iterable[list[SignatureMatch]], found: LogFindings, roots: set[int | None], *, many: bool
) -> list[CauseCandidate]:
    """Return the candidates, the best one first.

    Args:
        groups: lines with the same meaning, the earliest first.
        found: all findings from the logs.
        roots: ranks that a launcher reports as the first to end.
        many: True if the lines are of several files.
    """
    known = {hit.signature.id for hit in found.hits if not hit.survived}
    errors = [hit for hit in found.hits if _is_error(hit)] + own_complaints(found)
    candidates = [CauseCandidate(hits, _classify_hit_group(hits, known, errors)) for hits in groups]

    def key(one: CauseCandidate) -> tuple[int, bool, tuple[float, int]]:
        not_root = bool(roots) and not any(hit.rank in roots or roots & set(hit.ranks) for hit in one.hits)
        told_to = one.signature.id == "stopped"  # a consequence of another failure, even if it is printed first
        place = LIKELY if one.place == OPEN else one.place
        return (place, told_to or not_root, build_hit_sort_key(one.first, many))

    return sorted(candidates, key=key)


def own_complaints(found: LogFindings) -> list[SignatureMatch]:
    """Return unknown error messages that were not survived, without launchers' messages about ends."""
    return [
        hit
        for hit in found.complaints
        if not hit.survived and not _OF_AN_END.search(hit.line.raw) and classify_finding_source(hit) != "launcher"
    ]


def error_before(hit: SignatureMatch, errors: Sequence[SignatureMatch]) -> SignatureMatch | None:
    """Return an error that precedes a launcher's or scheduler's message about an end; None without one."""
    own_end = hit.end is not None and (hit.root or not hit.signature.ends)
    for error in errors:
        if error.signature.id == hit.signature.id:
            continue
        lost = error.signature.id in PEER_LOST
        if own_end and (lost or (error.rank is not None and hit.rank not in (None, error.rank))):
            continue  # one process crashed, and other processes reported the loss
        before = is_before(error, hit)
        if before or (before is None and not lost):
            return error
    return None


def _is_error(hit: SignatureMatch) -> bool:
    signature = hit.signature
    told = signature.ends or signature.role == "note" or hit.end is not None
    return not (told or hit.survived or hit.warned)


def _classify_hit_group(hits: Sequence[SignatureMatch], known: set[str], errors: Sequence[SignatureMatch]) -> int:
    """Return the place of a group in the ranking; `known` has the ids of findings that were not survived."""
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


def is_earliest(one: CauseCandidate, rivals: Iterable[CauseCandidate]) -> bool:
    """Return whether a candidate certainly precedes all others, by times or within one file."""
    return all(is_before(one.first, rival.first) for rival in rivals)
