"""Confidence of a diagnosis, by one rule for all causes. Pure.

High: a text with one meaning, or two facts from independent sources, if the process died from this cause and nothing in
the logs contradicts it. Low: a consequence, or a diagnosis from the class of an exception, a signal or a library's
report alone. Ambiguous: a text with several possible causes. Medium: all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtctl.doctor.explain import signatures
from dtctl.doctor.explain.diagnosis import UNKNOWN, Confidence
from dtctl.doctor.explain.log_findings import LogFindings, SignatureMatch
from dtctl.doctor.explain.timeline import (
    AFTERWARDS,
    DEFINITE,
    EFFECT,
    NOTE,
    OPEN,
    REFUTED,
    WARNED,
    CauseCandidate,
    classify_finding_source,
)

NEAR = 400
"""Number of lines before a diagnosis within which an unknown error may be its cause."""
_BY_SIGNAL = frozenset(
    ("killed", "segfault", "crashed", "signalled", "bus-error", "aborted", "cancelled", "agent-signalled",
     "loader-exited")
)  # fmt: skip
"""Kinds that show how a process or a job ended, but not why."""
_BY_CLASS = frozenset(
    ("bad-data", "bad-sample", "bad-configuration", "compile-failed", "download-failed", "gpu-error", "network-error")
)
"""Kinds that follow from the class and the module of an exception, regardless of its message."""
_OF_COMMANDS = frozenset(("missing-file", "missing-script", "command-missing"))
"""Kinds of errors of single commands, after which a script goes on."""
LAST_LINES = 12
"""Number of lines at the end of a log that a process may still print after the cause, while it ends."""


def compute_confidence(
    candidate: CauseCandidate,
    found: LogFindings,
    rivals: Sequence[CauseCandidate] = (),
    *,
    earliest: bool = True,
    combined: Confidence | None = None,
) -> Confidence:
    """Return the confidence of a diagnosis.

    Args:
        candidate: the cause with its lines.
        found: all findings from the logs.
        rivals: other definite causes.
        earliest: whether the cause certainly precedes all rivals, or a launcher reports it as the first failure.
        combined: highest confidence that combined facts allow; None if there are only the lines of the cause.
    """
    most = _compute_confidence_limit(candidate) if combined is None else combined
    if _has_script_gone_on(candidate.hits[-1], found):
        return "low"
    if most != "high":
        return most
    supported = combined == "high" or _is_fatal(candidate.hits, found)
    open_ = (bool(rivals) and not earliest) or _is_contradicted(candidate.hits, found)
    return "high" if supported and not open_ else "medium"


def say_again(candidate: CauseCandidate, confidence: Confidence) -> str:
    """Return settings for another run that would show more, if the lines of a cause do not suffice; else empty."""
    if confidence in ("high", "medium"):
        return ""
    signature, raised = candidate.signature, candidate.first.raised
    if signature.ambiguous:
        return signature.ambiguous
    if signature.id in _BY_SIGNAL:
        return "PYTHONFAULTHANDLER=1, which prints the line of a crash; dmesg -T on that node right after it"
    if candidate.place in (EFFECT, AFTERWARDS):
        return UNKNOWN.again
    return "" if raised is not None and raised.frames else "the standard error of every rank, with whole tracebacks"


def _compute_confidence_limit(candidate: CauseCandidate) -> Confidence:
    """Return the highest confidence that the kind of the cause and the sources of its lines allow."""
    signature, place, hits = candidate.signature, candidate.place, candidate.hits
    if place == OPEN and signature.ambiguous:
        return "ambiguous"
    if place in (EFFECT, AFTERWARDS, NOTE, WARNED, REFUTED) or _rests_on_class(hits):
        return "low"
    if place != DEFINITE:
        return "medium"
    if all(hit.raised is not None and hit.weight < 3 for hit in hits):  # the exception has a kind by its structure only
        return "medium"
    one_meaning = signature.sure and not signature.yields
    return "high" if one_meaning or _has_two_sources(hits) else "medium"


def _rests_on_class(hits: Sequence[SignatureMatch]) -> bool:
    """Return whether only the class of an exception, or the signal that ended a process, is known."""
    if hits[0].signature.id in _BY_SIGNAL:
        return True
    return all(hit.raised is not None and hit.weight < (3 if _is_of_class(hit) else 2) for hit in hits)


def _is_of_class(hit: SignatureMatch) -> bool:
    """Return whether the kind of an exception shows only its class; an unexpected argument has many reasons."""
    if hit.raised is not None and hit.signature.id == "version-conflict":
        return hit.raised.short not in ("ImportError", "ModuleNotFoundError")
    return hit.signature.id in _BY_CLASS


def _has_two_sources(hits: Sequence[SignatureMatch]) -> bool:
    """Return whether kernel and process both report the error; a launcher only repeats the process."""
    voices = {classify_finding_source(hit) for hit in hits if not hit.survived}
    return "kernel" in voices and bool(voices & {"program", "library", "traceback"})


def _has_script_gone_on(last: SignatureMatch, found: LogFindings) -> bool:
    """Return whether a script called further commands, which failed too, after one that had missed a file."""
    return (
        last.signature.id in _OF_COMMANDS
        and last.raised is None
        and any(
            hit.signature.id in _OF_COMMANDS
            and hit.signature.id != last.signature.id
            and hit.raised is None
            and hit.line.file == last.line.file
            and hit.order > last.order
            for hit in found.hits
        )
    )


def _is_fatal(hits: Sequence[SignatureMatch], found: LogFindings) -> bool:
    """Return whether the logs show that the process died of this error."""
    return (
        any(hit.uncaught for hit in hits)
        or signatures.SPOKEN_BY_TOOLS.search(hits[0].signature.source) is not None
        or any(hit.end is not None and not hit.survived for hit in found.hits)
        or len({hit.rank for hit in hits if hit.rank is not None}) > 1
        or len(hits) > 2
        or _has_two_sources(hits)
        or _is_last_word(hits[-1], found)
    )


def _is_last_word(last: SignatureMatch, found: LogFindings) -> bool:
    """Return whether the program prints nothing more after a line."""
    ended = last.line.number + LAST_LINES >= found.length.get(last.line.file, 0)
    return ended and not any(hit.order > last.order and hit.raised is not None for hit in found.hits)


def _is_contradicted(hits: Sequence[SignatureMatch], found: LogFindings) -> bool:
    """Return whether the text is only a mention or incomplete, follows another failure, or may be of another run."""
    first = hits[0]
    cut = first.raised is not None and first.raised.cut
    return (
        first.weight == 0
        or cut
        or any(_just_before(hit, first) and hit.signature.role == "cause" and not hit.warned for hit in found.hits)
        or any(_just_before(hit, first) for hit in found.complaints)
        or _has_several_runs(hits, found)
    )


def _just_before(hit: SignatureMatch, first: SignatureMatch) -> bool:
    """Return whether another error occurred shortly before and was not survived."""
    return (
        hit.line.file == first.line.file
        and 0 < first.line.number - hit.line.number <= NEAR
        and not hit.survived
        and hit.signature.id != first.signature.id
    )


def _has_several_runs(hits: Sequence[SignatureMatch], found: LogFindings) -> bool:
    """Return whether one process seems to have ended twice, so that the file has lines of several runs."""
    first = next((hit for hit in hits if hit.uncaught), None)
    return first is not None and any(
        hit.uncaught
        and (hit.restarted or not hit.survived)
        and hit.signature.role == "cause"
        and hit.rank == first.rank
        and hit.line.file == first.line.file
        for hit in found.hits
        if hit not in hits
    )
