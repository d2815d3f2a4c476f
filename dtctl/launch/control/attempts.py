"""The attempts of a run: their number, and the decision whether another one follows."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from dtctl.launch.control import failure as failures
from dtctl.launch.control.attempt_nodes import AttemptOutcome
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.run_nodes import RunNodes
from dtctl.launch.records.events import AttemptRestarting, LauncherPaused, NodeOutputs, Note
from dtctl.launch.records.ledger import Ledger
from dtctl.supervisor.frames import METRICS

if TYPE_CHECKING:
    from dtctl.launch.control.restart_policy import RestartDecision, RestartPolicy


class AttemptTracker:
    """Count of a run's attempts, and decision whether another one follows."""

    def __init__(self, nodes: RunNodes, ledger: Ledger, *, first: int, number: int) -> None:
        """Begin with attempt `number`; `first` is the first attempt of this launcher."""
        self._nodes, self._ledger = nodes, ledger
        self.number = number
        """Number of the current attempt."""
        self.committed_step = 0
        """Step of the newest snapshot that the attempts have reported as committed."""
        self.lost_output = Counter[str]()
        self.outputs: dict[str, NodeOutputs] = {}
        self._unblamed = first
        """Attempts that do not count as restarts: earlier ones, and those that a pause of the launcher ended."""
        self._policy: RestartPolicy | None = None
        self._begun = time.monotonic()

    def begin(self) -> None:
        """Record that an attempt begins now."""
        self._begun = time.monotonic()

    def count(self, outcome: AttemptOutcome) -> None:
        """Add the end of an attempt, its outputs and its newest snapshot to the totals of the run."""
        failed = min((failure.time for failure in outcome.failures), default=None)
        failed_s = 0.0 if failed is None else max(0.0, time.time() - failed)
        self._ledger.record_attempt_end(failed_s=failed_s, hung_s=outcome.hung_s)
        self.lost_output.update(outcome.lost_output)
        self.outputs |= outcome.outputs
        self.committed_step = max(self.committed_step, outcome.committed_step)

    def wait_for_next_attempt(self, outcome: AttemptOutcome, failure: Failure | None) -> bool:
        """Return whether another attempt follows, after the wait before it; `number` is then the number of that one."""
        plan, emit = self._nodes.plan, self._nodes.emit
        if outcome.away_s and failure is None and outcome.stopped_by is None:
            self.number, self._unblamed = self.number + 1, self._unblamed + 1
            emit(LauncherPaused(away_s=round(outcome.away_s, 1), attempt=self.number))
            self._ledger.enter("restart")
            return True
        if failure is None or outcome.stopped_by is not None:
            return False
        if self.is_stop(failure):
            subject = "the agent" if failure.rank is None else f"rank {failure.rank}"
            emit(Note(node=failure.node, text=f"{subject} {failures.describe_failure(failure)}"))
            return False
        if self.number - self._unblamed >= plan.max_restarts:
            return False
        decision = self._decide_restart(outcome, failure)
        if decision.give_up_reason:
            emit(Note(node=failure.node, text=f"not restarted: {decision.give_up_reason}"))
            return False
        self.number += 1
        self._ledger.enter("idle" if decision.wait_s else "restart")
        reason = failures.describe_failure(failure)
        emit(
            AttemptRestarting(
                attempt=self.number, of=plan.max_restarts + self._unblamed, wait_s=decision.wait_s,
                reason=reason if failure.blames_node else f"the run {reason}",
                node=failure.node if failure.blames_node else None,
                rank=failure.rank, exit_code=failure.exit_code,
            )
        )  # fmt: skip
        self._nodes.gang.wait_with_keepalive(decision.wait_s)
        self._ledger.enter("restart")
        return True

    def first_failure(self, outcome: AttemptOutcome) -> Failure | None:
        """Return the failure that ended an attempt; None if it has not failed."""
        if not outcome.failures:
            return None
        from dtctl.launch.control.first_failure import find_first_failure  # Most runs do not need this module.
        from dtctl.launch.records.host_names import HostNames

        return find_first_failure(
            outcome.failures, outcome.left_early, self._nodes.logs, HostNames(self._nodes.host_names)
        )

    def is_stop(self, failure: Failure) -> bool:
        """Return whether workers have ended because of a request to stop."""
        return failures.is_stop(failure, trains=self._nodes.job.trains)

    def _decide_restart(self, outcome: AttemptOutcome, failure: Failure) -> RestartDecision:
        """Decide whether and when the next attempt starts after one that has failed."""
        from dtctl.launch.control.restart_policy import RestartPolicy  # Most runs do not need this module.
        from dtctl.launch.records.metrics_rows import read_last_step

        self._policy = self._policy or RestartPolicy(trains=self._nodes.job.trains)
        logged = read_last_step(self._nodes.logs.path("", METRICS))
        step = logged if outcome.last_step is None else max(outcome.last_step, logged or 0)
        return self._policy.decide_next_attempt(
            failure, step=step, first=outcome.first_step, lasted_s=time.monotonic() - self._begun
        )
