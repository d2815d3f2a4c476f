"""Result of `dtctl doctor --log`: diagnoses with their evidence, and one of three verdicts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dtctl.doctor.explain.read import UnreadFile

Confidence = Literal["high", "medium", "low", "ambiguous", "unknown"]
Verdict = Literal["explained", "failed-unknown", "no-failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Line of a log that supports a diagnosis."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Cause of a failure, with its evidence."""

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
    """True if training continued after this error."""
    again: str = ""
    """Settings and outputs with which the same failure would show more; empty if the cause is known."""
    follows: bool = False
    """True if this is a consequence of the primary cause, by its text or its time."""

    def as_json(self) -> dict[str, Any]:
        """Return the object that `dtctl doctor --log --json` prints."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Diagnoses of a set of logs."""

    verdict: Verdict
    diagnoses: list[Diagnosis]
    """Diagnoses, the primary one first; without a failure none is primary, and the list may be empty."""
    unread: list[UnreadFile]


UNKNOWN = Diagnosis(
    id="unknown",
    cause="the job failed, and these logs do not show the reason",
    nodes=(),
    ranks=(),
    primary=True,
    confidence="unknown",
    fix="give the logs of all ranks, with what they printed on standard error; NCCL_DEBUG=WARN makes NCCL print "
    "its errors",
    source="",
    evidence=(),
    again="NCCL_DEBUG=WARN, and the standard error of every rank in its own file (torchrun --log-dir DIR --tee 3)",
)
