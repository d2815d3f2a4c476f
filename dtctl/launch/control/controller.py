"""Run a job from its first attempt to its final result, independent of the back end.

Nodes over SSH (run.py) and a job of Slurm (dtctl/slurm/job_backend.py) are back ends of this loop. It decides for both
what an end means, and the exit code of the launcher.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dtctl import names
from dtctl.launch.control.failure import Failure
from dtctl.launch.records.events import FirstFailure, Outputs, RunEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a run."""

    run: str
    failure: Failure | None
    """Failure that ended the last attempt; None when it ended well, or for no fault of its own."""
    stopped_by: int | None
    """Signal that ended it; None without one."""
    asked_to_stop: bool
    """True if its workers got a request to end, saved a snapshot and are to be launched again."""
    attempts: int
    launch_s: float | None
    """Seconds from the launcher's start to the last node's processes started; None if that was never reached."""
    duration_s: float
    left_behind: int | None
    """Processes of the run left on all nodes; None when a node could not be asked."""
    lost_output: Mapping[str, int] = field(default_factory=dict)
    """Node -> bytes of its workers' output that could not be stored, there or here; empty when all was."""
    cut_output: Mapping[str, int] = field(default_factory=dict)
    """Node -> bytes of its workers' output that `log_mib` has cut out."""
    log_mib: int = 0
    """`job.log_mib`."""
    outputs: Mapping[str, Outputs] = field(default_factory=dict)
    """Node -> what the run has put out there; without nodes that were lost."""
    is_local: bool = False
    """True if the run's only node was this machine."""
    nodes: int
    goodput: float | None
    """Share of the time that was spent on steps which count; None when the job reports no progress."""

    @property
    def status(self) -> str:
        """One of succeeded, failed and stopped."""
        if self.stopped_by is not None or self.asked_to_stop:
            return "stopped"
        return "succeeded" if self.failure is None else "failed"

    @property
    def exit_code(self) -> int:
        """Return the exit code of the launcher."""
        # Batch systems send SIGUSR1 when the time is nearly up: the run is to be launched again.
        if self.stopped_by is not None and self.stopped_by != signal.SIGUSR1:
            return 128 + self.stopped_by
        return {"stopped": names.REQUEUE_EXIT, "failed": 8}.get(self.status, 0)

    @property
    def first_failure(self) -> Failure | None:
        """Return what a run that has failed failed of."""
        return self.failure if self.status == "failed" else None

    def to_event(self) -> RunEnded:
        """Return the last event of the run."""
        failure = self.first_failure
        first_failure = None
        if failure is not None:
            first_failure = FirstFailure(
                node=failure.node,
                rank=failure.rank,
                exit_code=failure.exit_code,
                signal=failure.signal,
                log=failure.log,
                summary=failure.summary,
                hang=failure.hang or None,
            )
        return RunEnded(
            run=self.run,
            status=self.status,
            exit_code=self.exit_code,
            attempts=self.attempts,
            first_failure=first_failure,
            launch_s=round(self.launch_s, 3) if self.launch_s is not None else None,
            duration_s=round(self.duration_s, 3),
            left_behind=self.left_behind,
            goodput=self.goodput,
            lost_output=dict(self.lost_output),
            cut_output=dict(self.cut_output),
            outputs={node: outputs for node, outputs in self.outputs.items() if outputs.files},
        )


class Backend(Protocol):
    """Place where the workers of a run are, and the way to reach them. It emits an event for everything that it sees.

    Methods return soon, but for those that start an attempt.
    """

    def start(self) -> bool:
        """Start the first attempt, or take up the running one; return False after an earlier request to stop.

        Raises:
            DtctlError: nothing could be started anywhere.
        """
        ...

    @property
    def is_running(self) -> bool:
        """Return whether the attempt is still running on some node."""
        ...

    def poll(self) -> None:
        """Take in what has happened, or wait for a moment."""
        ...

    def interrupt(self, number: int, *, again: bool) -> None:
        """End the attempt because of a signal; `again`: there was one before. Called until nothing runs any more."""
        ...

    def restart(self) -> bool:
        """Return the attempt is over: start another one in its place; False when there is to be none.

        Raises:
            DtctlError: another one could not be started.
        """
        ...

    def close(self) -> None:
        """Let go of everything, however it ended."""
        ...

    def result(self) -> Result:
        """Return how it ended; called last."""
        ...


def control(backend: Backend, signals: list[int]) -> Result:
    """Run a job to its end.

    Args:
        backend: where its workers are.
        signals: signals that this process receives are appended here by its handlers.

    Raises:
        DtctlError: what `Backend.start` and `Backend.restart` raise.
    """
    try:
        goes_on = backend.start()
        while goes_on:
            while backend.is_running:
                if signals:
                    backend.interrupt(signals[-1], again=len(signals) > 1)
                backend.poll()
            goes_on = backend.restart()
    finally:
        backend.close()
    return backend.result()
