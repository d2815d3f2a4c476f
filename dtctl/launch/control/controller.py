"""Run a job from its first attempt to its final result, independent of the back end.

Nodes over SSH (run.py) and a job of Slurm (dtctl/slurm/job_backend.py) are back ends of this loop. For both, it decides
how the run has ended, and the exit code of the launcher.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dtctl import names
from dtctl.launch.control.failure import Failure
from dtctl.launch.records.events import FirstFailure, NodeOutputs, RunEnded, decide_end_status


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a run."""

    run: str
    failure: Failure | None
    """Failure that ended the last attempt; None if the attempt succeeded or was stopped."""
    stopped_by: int | None
    """Signal that ended the run; None without one."""
    asked_to_stop: bool
    """True if the workers got a request to end and saved a snapshot, so that the run should be launched again."""
    attempts: int
    launch_s: float | None
    """Seconds from the launcher's start until all nodes had started their processes; None if that was never reached."""
    duration_s: float
    left_behind: int | None
    """Number of the run's processes left on all nodes; None if a node could not be queried."""
    lost_output: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the workers' output, by node, that could not be stored there or here; empty if all was stored."""
    cut_output: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the workers' output, by node, that were removed because of the limit `log_mib`."""
    log_mib: int = 0
    """Limit of a worker's output in MiB, `job.log_mib`."""
    outputs: Mapping[str, NodeOutputs] = field(default_factory=dict)
    """Outputs of the run on each node, except lost nodes."""
    is_local: bool = False
    """True if the run's only node was this machine."""
    nodes: int
    goodput: float | None
    """Share of the time that was spent on steps that were not lost; None if the job reports no progress."""

    @property
    def status(self) -> str:
        """Result as a word: succeeded, failed or stopped."""
        return decide_end_status(
            is_stopped=self.stopped_by is not None or self.asked_to_stop, has_failed=self.failure is not None
        )

    @property
    def exit_code(self) -> int:
        """Return the exit code of the launcher."""
        # Batch systems send SIGUSR1 shortly before the time limit; the run should then be launched again.
        if self.stopped_by is not None and self.stopped_by != signal.SIGUSR1:
            return 128 + self.stopped_by
        return {"stopped": names.REQUEUE_EXIT, "failed": 8}.get(self.status, 0)

    @property
    def first_failure(self) -> Failure | None:
        """Return the failure that a failed run reports; None for any other run."""
        return self.failure if self.status == "failed" else None

    def to_event(self) -> RunEnded:
        """Return the last event of the run."""
        failure = self.first_failure
        first_failure = None
        if failure is not None:
            first_failure = FirstFailure(
                node=failure.node if failure.blames_node else None,
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
    """Back end that runs the workers of a run, and emits an event for everything that happens.

    All methods return soon, except those that start an attempt.
    """

    def start(self) -> bool:
        """Start the first attempt, or reattach to the running one; return False after an earlier request to stop.

        Raises:
            DtctlError: nothing could be started on any node.
        """
        ...

    @property
    def is_running(self) -> bool:
        """Return whether the attempt is still running on some node."""
        ...

    def poll(self) -> None:
        """Process the next message, or wait for a moment."""
        ...

    def interrupt(self, number: int, *, again: bool) -> None:
        """End the attempt because of a signal; `again`: an earlier signal did so already. Called until nothing runs."""
        ...

    def restart(self) -> bool:
        """Start the next attempt after the end of one; return False if none follows.

        Raises:
            DtctlError: the next attempt could not be started.
        """
        ...

    def close(self) -> None:
        """Close all links and files, whatever the result of the run."""
        ...

    def result(self) -> Result:
        """Return the result of the run; called last."""
        ...


def run_backend_to_end(backend: Backend, signals: list[int]) -> Result:
    """Run a job to its end.

    Args:
        backend: back end that runs the workers.
        signals: signals that this process receives are appended here by its handlers.

    Raises:
        DtctlError: `Backend.start` or `Backend.restart` failed.
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
