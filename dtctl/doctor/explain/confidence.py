"""Confidence of a diagnosis, from the facts for it and against it in these logs, not from its text alone. Pure.

For it: a text that says what happened, an exception that ended its process, an end that a launcher reports, several
ranks or a scheduler that say it. Against it: an error before it that nobody understands, another definite cause that
is not later, a text that a line only mentions, a log that begins in the middle of an error, ranks that were not heard.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtctl.doctor.explain import signatures
from dtctl.doctor.explain.diagnosis import Confidence
from dtctl.doctor.explain.found import Found, Hit

SURE = 3
"""Signs from which on a diagnosis is of high confidence."""
NEAR = 400
"""Lines before a diagnosis within which an error that is not understood may be its cause."""


def weighed(
    group: Sequence[Hit], rivals: Sequence[Sequence[Hit]], found: Found, before: Confidence, *, earliest: bool
) -> Confidence:
    """Return the confidence of a primary cause, no higher than its place allows.

    Args:
        group: its hits, the first one first.
        rivals: the other definite causes.
        found: all that the logs say.
        before: what the kind of the cause allows at most.
        earliest: whether it certainly comes before all of the rivals, or a launcher says so.
    """
    if before != "high":
        return before
    signs = _for(group, found) - _against(group, found) + ((1 if earliest else -2) if rivals else 0)
    signs -= 3 * _several_runs(group, found)
    return "high" if signs >= SURE else "medium"


def _several_runs(group: Sequence[Hit], found: Found) -> bool:
    """Return whether one process seems to have ended twice: what stands in one file is then of several runs."""
    first = next((hit for hit in group if hit.uncaught), None)
    return first is not None and any(
        hit.uncaught
        and (hit.restarted or not hit.survived)
        and hit.signature.role == "cause"
        and hit.rank == first.rank
        and hit.line.file == first.line.file
        for hit in found.hits
        if hit not in group
    )


def _for(group: Sequence[Hit], found: Found) -> int:
    first = group[0]
    signs = 2  # the text itself
    if any(hit.uncaught for hit in group) or signatures.SPOKEN_BY_TOOLS.search(first.signature.source):
        signs += 1
    if any(hit.end is not None and not hit.survived for hit in found.hits):
        signs += 1
    if len({hit.rank for hit in group if hit.rank is not None}) > 1 or len(group) > 2:
        signs += 1
    if _last_word(group, found):
        signs += 1
    return signs


def _last_word(group: Sequence[Hit], found: Found) -> bool:
    """Return whether the program of the last hit says nothing more."""
    last = group[-1]
    ended = last.line.number + 12 >= found.length.get(last.line.file, 0)
    return ended and not any(hit.order > last.order and hit.raised is not None for hit in found.hits)


def _against(group: Sequence[Hit], found: Found) -> int:
    first = group[0]
    causes = any(_just_before(hit, first) and hit.signature.role == "cause" and not hit.warned for hit in found.hits)
    unknown = any(_just_before(hit, first) for hit in found.complaints)
    signs = causes + 2 * unknown
    signs += first.weight == 0  # words in a line that calls itself no error
    signs += first.raised is not None and first.raised.cut
    return signs


def _just_before(hit: Hit, first: Hit) -> bool:
    """Return whether something else went wrong shortly before, and was not survived."""
    return (
        hit.line.file == first.line.file
        and 0 < first.line.number - hit.line.number <= NEAR
        and not hit.survived
        and hit.signature.id != first.signature.id
    )
