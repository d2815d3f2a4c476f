"""The attempts of a run: counted, and followed by another one or not."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from dtctl.launch.control import failure as failures
from dtctl.launch.control.attempt_nodes import AttemptOutcome
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.run_nodes import RunNodes
from dtctl.launch.records.events import LauncherAway, Note, Outputs, Restarting
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.logs import METRICS

if TYPE_CHECKING:
    from dtctl.launch.control.restart_policy import RestartDecision, RestartPolicy


class Attempts:
    """Counts attempts, and decides whether another one follows."""

    def __init__(self, nodes: RunNodes, ledger: Ledger, *, first: int, number: int) -> None:
        """Begin with an attempt; `first` is the first of this run of the launcher."""
        self._nodes, self._ledger = nodes, ledger
        self.number = number
        """Number of the current attempt."""
        self.committed_step = 0
        """Step of the newest snapshot that they have reported."""
        self.lost_output = Counter[str]()
        self.outputs: dict[str, Outputs] = {}
        self._unblamed = first
        """Attempts that ended because this launcher was away, or before it came."""
        self._policy: RestartPolicy | None = None
        self._begun = time.monotonic()

    def begin(self) -> None:
        """Note that an attempt begins now."""
        self._begun = time.monotonic()

    def count(self, outcome: AttemptOutcome) -> None:
        """Tell the ledger that an attempt is over."""
        failed = min((failure.time for failure in outcome.failures), default=None)
        failed_s = 0.0 if failed is None else max(0.0, time.time() - failed)
        self._ledger.ended(failed_s=failed_s, hung_s=outcome.hung_s)
        self.lost_output.update(outcome.lost_output)
        self.outputs |= outcome.outputs
        self.committed_step = max(self.committed_step, outcome.committed_step)

    def is_next(self, outcome: AttemptOutcome, failure: Failure | None) -> bool:
        """Return whether another attempt follows, once its deliberate wait is over; `number` is its number then."""
        plan, emit = self._nodes.plan, self._nodes.emit
        if outcome.away_s and failure is None and outcome.stopped_by is None:
            self.number, self._unblamed = self.number + 1, self._unblamed + 1
            emit(LauncherAway(away_s=round(outcome.away_s, 1), attempt=self.number))
            self._ledger.enter("restart")
            return True
        if failure is None or outcome.stopped_by is not None:
            return False
        if self.is_stop(failure):
            subject = "the agent" if failure.rank is None else f"rank {failure.rank}"
            emit(Note(node=failure.node, text=f"{subject} {failures.describe(failure)}"))
            return False
        if self.number - self._unblamed >= plan.max_restarts:
            return False
        decision = self._judge(outcome, failure)
        if decision.give_up_reason:
            emit(Note(node=failure.node, text=f"not restarted: {decision.give_up_reason}"))
            return False
        self.number += 1
        self._ledger.enter("idle" if decision.wait_s else "restart")
        reason = failures.describe(failure)
        emit(
            Restarting(
                attempt=self.number, of=plan.max_restarts + self._unblamed, reason=reason, wait_s=decision.wait_s,
                node=failure.node, rank=failure.rank, exit_code=failure.exit_code,
            )
        )  # fmt: skip
        self._nodes.gang.idle(decision.wait_s)
        self._ledger.enter("restart")
        return True

    def first_failure(self, outcome: AttemptOutcome) -> Failure | None:
        """Return what an attempt has failed of."""
        if not outcome.failures:
            return None
        from dtctl.launch.control.culprit import first_failure  # most runs need none
        from dtctl.launch.records.host_names import HostNames

        return first_failure(outcome.failures, outcome.left_early, self._nodes.logs, HostNames(self._nodes.host_names))

    def is_stop(self, failure: Failure) -> bool:
        """Return whether workers have ended because of a request to stop."""
        return failures.is_stop(failure, trains=self._nodes.job.trains)

    def _judge(self, outcome: AttemptOutcome, failure: Failure) -> RestartDecision:
        """Decide whether and when to start again after an attempt that has failed."""
        from dtctl.launch.control.restart_policy import RestartPolicy  # most runs need none
        from dtctl.launch.records.metrics_rows import read_last_step

        self._policy = self._policy or RestartPolicy(trains=self._nodes.job.trains)
        logged = read_last_step(self._nodes.logs.path("", METRICS))
        step = logged if outcome.last_step is None else max(outcome.last_step, logged or 0)
        return self._policy.judge(failure, step=step, first=outcome.first_step, lasted_s=time.monotonic() - self._begun)
