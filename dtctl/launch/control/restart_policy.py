"""Policy of restarts after a failure: the decision, and the time of the next attempt. Pure.

A failure that recurs without progress in between will recur again: the run ends with it instead of using up its
restarts. Until then the waits grow, because the cause may need time to disappear (a disk that is being cleaned, a file
server that boots). That applies to failures of the program; a worker that was killed from outside, or lost its node, is
restarted at once.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from dtctl.errors import PlanError, SpecError
from dtctl.launch.control.failure import Failure, describe

SAME_LIMIT = 3
"""Attempts that may end in the same way at the same step."""
SURE_LIMIT = 2
"""The same, where only the program can be the cause: the last attempt had done steps, then failed with the same error
in the same step. A faulty machine does not wait for a step."""
LONG_S = 300.0
"""An attempt that lasted longer has made progress, even if it reports no steps."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
REFUSED = (SpecError.exit_code, PlanError.exit_code)
"""Exit code of workers with dtctl.runtime that cannot do what the spec asks for."""
_STEP = re.compile(r"^.*?\bstep \d+")
"""An error that names its step is the same one if its words are, up to there: the rest may be known better by now."""
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


_NEVER = (
    (re.compile(r"\b(?:ModuleNotFoundError|No module named\b)"), "a module is missing"),
    (re.compile(r"^(?:\w+\.)*ImportError\b"), "an import fails"),
    (re.compile(r"^(?:SyntaxError|IndentationError|TabError)\b"), "the program is not valid Python"),
    (re.compile(r"can't open file "), "the program is not there"),
)
_USAGE = re.compile(r"^\S+: error: |^usage: ", re.MULTILINE)


def hopeless(failure: Failure) -> str:
    """Return what about a failure would be the same after any number of restarts; empty if something may change."""
    if failure.signal is not None or not failure.exit_code:
        return ""
    if failure.exit_code == 2 and _USAGE.search("\n".join(failure.tail)):
        return "the program does not understand its arguments"
    if failure.exit_code in (126, 127):
        return "the program cannot be started"
    return next((reason for pattern, reason in _NEVER if pattern.search(failure.summary)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """Decision after a failure."""

    wait_s: float = 0.0
    """Seconds before the next attempt."""
    give_up_reason: str | None = None
    """Reason why there should be no next attempt."""


class RestartPolicy:
    """Judges each failure by the attempts before it."""

    def __init__(self, *, trains: bool = False) -> None:
        """Create a policy before the first attempt.

        Args:
            trains: whether the job is a training run with dtctl.runtime, where exit codes have a meaning.
        """
        self._refused = REFUSED if trains else ()
        self._last: str | None = None
        self._step = self._failed_at = -1
        self._repeats = 0

    def judge(
        self, failure: Failure, *, step: int | None, lasted_s: float, first: int | None = None
    ) -> RestartDecision:
        """Take in the end of an attempt.

        Args:
            failure: why it ended.
            step: the last step that is known to have been done, of the whole run; None when the job reports none.
            lasted_s: from its start to the failure.
            first: the step that it began after; None when the job reports none.
        """
        if failure.exit_code in self._refused and failure.signal is None:
            return RestartDecision(
                give_up_reason="the workers cannot carry out the spec, and a restart would not change that"
            )
        if lasted_s < LONG_S and not step and (reason := hopeless(failure)):
            return RestartDecision(give_up_reason=f"a restart would not change that {reason}")
        lost = failure.exit_code is None and not (failure.hang or failure.early_exit)
        if lost or (failure.signal in FROM_OUTSIDE and not failure.node_reason):
            return RestartDecision()
        # The first worker reports an error that all workers run into, so the text is compared and not the worker. But
        # the text of a hang has seconds in it, and the reason of a kill has counters: there the worker is compared.
        text_varies = failure.hang or bool(failure.node_reason)
        named = _STEP.search(failure.summary)
        error_text = named[0] if named else failure.summary
        kind = f"{failure.node} {failure.rank}" if text_varies else f"{describe(failure)} {error_text}"
        progress = lasted_s > LONG_S if step is None else step > self._step
        self._step = max(self._step, step if step is not None else -1)
        repeated = kind == self._last and not text_varies and (step == self._failed_at or named is not None)
        self._failed_at = -1 if step is None else step
        if repeated and step is not None and first is not None and first < step:
            return RestartDecision(
                give_up_reason=f"{SURE_LIMIT} attempts have failed with the same error after step {step}"
            )
        if progress:
            self._last, self._repeats = kind, 1
            return RestartDecision()
        self._repeats = self._repeats + 1 if kind == self._last else 1
        self._last = kind
        if self._repeats >= SAME_LIMIT:
            position = f"at step {step}" if step is not None else "at the start"
            return RestartDecision(give_up_reason=f"{SAME_LIMIT} attempts have failed in the same way {position}")
        return RestartDecision(
            wait_s=0.0 if self._repeats == 1 else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self._repeats - 2))
        )
