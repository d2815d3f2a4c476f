"""What a training prints of a resume: first what is known to differ, then what repeating steps has shown."""

from __future__ import annotations

import re

RESUMED = re.compile(r"resumed at step (\d+)(?: of \d+)?(?: from memory)?: (nothing known differs|known to differ: .*)")
VERDICT = re.compile(r"^(?:\[\S*\]\s*)?(exact: steps? \d.*|not exact: .*|not confirmed: .*)$", re.MULTILINE)


def read_verdict(text: str) -> str:
    """Return `exact`, or all that the last resume in a text says of why it is not; empty if there is none.

    A resume of a training that was through already has no verdict, only what is known.
    """
    found = list(RESUMED.finditer(text))
    if not found:
        return ""
    resumed = found[-1]
    verdicts = VERDICT.findall(text[resumed.end() :])
    # The losses of later steps may take back what the first ones have shown.
    verdicts.sort(key=lambda verdict: not verdict.startswith("not exact: "))
    if verdicts and verdicts[0].startswith("exact: "):
        return "exact"
    known = resumed[2]
    if verdicts and known.removeprefix("known to differ: ") in verdicts[0]:
        return str(verdicts[0])
    return "; ".join([*verdicts[:1], *([known] if known != "nothing known differs" or not verdicts else [])])


def is_unrecorded(verdict: str) -> bool:
    """Whether nothing speaks against a resume, and nothing was recorded that could confirm it."""
    return bool(re.match(r"not confirmed: step \d+ was not recorded", verdict)) and "known to differ" not in verdict
