"""Policy of restarts after a failure: the decision, and the time of the next attempt.

A failure that recurs without progress in between will recur again: the run ends with it instead of using up its
restarts. Before that, the waits grow, because the cause may need time to disappear (a disk that is being cleaned, a
file server that boots). This wait applies to failures of the program; after a kill from outside or the loss of a node,
the workers are restarted immediately.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from dtctl.errors import PlanError, SpecError
from dtctl.launch.control.failure import Failure, describe_failure

SAME_LIMIT = 3
"""Number of attempts that may end in the same way at the same step."""
SURE_LIMIT = 2
"""Number of attempts as in `SAME_LIMIT` if only the program can be the cause: the last attempt had done steps, then
failed with the same error in the same step. Faults of a machine do not depend on the step."""
LONG_S = 300.0
"""Seconds after which an attempt counts as one that has made progress, even if it reports no steps."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
REFUSED = (SpecError.exit_code, PlanError.exit_code)
"""Exit codes of workers with dtctl.runtime that cannot carry out the spec."""
_STEP = re.compile(r"^.*?\bstep \d+")
"""Part of an error, up to the number of a step, that is compared: a later attempt may report more details after it."""
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


_NEVER = (
    (re.compile(r"\b(?:ModuleNotFoundError|No module named\b)"), "a module is missing"),
    (re.compile(r"^(?:\w+\.)*ImportError\b"), "an import fails"),
    (re.compile(r"^(?:SyntaxError|IndentationError|TabError)\b"), "the program is not valid Python"),
    (re.compile(r"can't open file "), "the program does not exist"),
)
_USAGE = re.compile(r"^\S+: error: |^usage: ", re.MULTILINE)


def describe_permanent_cause(failure: Failure) -> str:
    """Return the cause of a failure if no restart would change it; empty if a restart may."""
    if failure.signal is not None or not failure.exit_code:
        return ""
    if failure.exit_code == 2 and _USAGE.search("\n".join(failure.tail)):
        return "the program does not understand its arguments"
    if failure.exit_code in (126, 127):
        return "the program cannot be started"
    return next((reason for pattern, reason in _NEVER if pattern.search(failure.summary)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """Decision about a restart after a failure."""

    wait_s: float = 0.0
    """Seconds before the next attempt."""
    give_up_reason: str | None = None
    """Reason why there should be no next attempt."""


class RestartPolicy:
    """Decisions about restarts, each based on the earlier attempts."""

    def __init__(self, *, trains: bool = False) -> None:
        """Create a policy before the first attempt.

        Args:
            trains: whether the job is a training run with dtctl.runtime, where exit codes have a meaning.
        """
        self._refused = REFUSED if trains else ()
        self._last: str | None = None
        self._step = self._failed_at = -1
        self._repeats = 0

    def decide_next_attempt(
        self, failure: Failure, *, step: int | None, lasted_s: float, first: int | None = None
    ) -> RestartDecision:
        """Decide whether and when another attempt follows the end of one.

        Args:
            failure: failure that ended the attempt.
            step: last step that is known to be done, counted over the whole run; None if the job reports no steps.
            lasted_s: seconds from the start of the attempt to the failure.
            first: step after which the attempt began; None if the job reports no steps.
        """
        decision = self._decide_by_cause(failure, step=step, lasted_s=lasted_s)
        if decision is not None:
            return decision
        # If all workers run into one error, any of them may report it first, so the text is compared and not the
        # worker. The texts of hangs and kills contain seconds and counters, so for these the worker is compared.
        text_varies = failure.hang or bool(failure.node_reason)
        named_step = _STEP.search(failure.summary)
        if text_varies:
            kind = f"{failure.node} {failure.rank}"
        else:
            error_text = named_step[0] if named_step else failure.summary
            kind = f"{describe_failure(failure)} {error_text}"
        is_same = kind == self._last
        is_same_step = step == self._failed_at or named_step is not None
        has_progressed = step > self._step if step is not None else lasted_s > LONG_S
        self._failed_at = -1 if step is None else step
        self._step = max(self._step, self._failed_at)
        has_taken_steps = step is not None and first is not None and first < step
        if has_taken_steps and is_same and is_same_step and not text_varies:
            return RestartDecision(
                give_up_reason=f"{SURE_LIMIT} attempts have failed with the same error after step {step}"
            )
        self._last = kind
        self._repeats = self._repeats + 1 if is_same and not has_progressed else 1
        if self._repeats >= SAME_LIMIT:
            position = f"at step {step}" if step is not None else "at the start"
            return RestartDecision(give_up_reason=f"{SAME_LIMIT} attempts have failed in the same way {position}")
        if self._repeats == 1:
            return RestartDecision()
        return RestartDecision(wait_s=min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self._repeats - 2)))

    def _decide_by_cause(self, failure: Failure, *, step: int | None, lasted_s: float) -> RestartDecision | None:
        """Return the decision about a failure that does not depend on earlier attempts; None for other failures."""
        if failure.exit_code in self._refused and failure.signal is None:
            return RestartDecision(
                give_up_reason="the workers cannot run with this spec, and a restart would not change that"
            )
        if lasted_s < LONG_S and not step and (reason := describe_permanent_cause(failure)):
            return RestartDecision(give_up_reason=f"a restart would not change that {reason}")
        is_lost = failure.exit_code is None and not failure.hang and not failure.early_exit
        is_killed = failure.signal in FROM_OUTSIDE and not failure.node_reason
        return RestartDecision() if is_lost or is_killed else None
