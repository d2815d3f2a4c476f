"""Choice of the failure that ended an attempt, from the nodes' reports, the logs and the workers that left early."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from dtctl.launch.control import failure as failures
from dtctl.launch.control import hang
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.progress import RankProgress
from dtctl.launch.records.host_names import HostNames
from dtctl.supervisor.frames import AGENT


class WorkerOutput(Protocol):
    """Output of the workers in the attempt; rank -1 is torchrun's agent."""

    def tail(self, node: str, rank: int) -> str:
        """Return the end of a worker's output."""
        ...

    def path(self, node: str, rank: int) -> Path:
        """Return the file of a worker's output."""
        ...


def find_first_failure(
    reported: Iterable[Failure],
    left_early: Iterable[RankProgress],
    output: WorkerOutput,
    host_names: HostNames | None = None,
) -> Failure | None:
    """Return the failure that caused the others; None if nothing failed.

    Args:
        reported: failures of the attempt.
        left_early: workers that left without a failure although steps remained.
        output: output of the workers.
        host_names: host names of the nodes, which are replaced by the names of the spec in quoted output.
    """
    host_names = host_names or HostNames({})
    failure = failures.find_root_failure(_add_log_details(failure, output, host_names) for failure in reported)
    if failure is None or not failures.is_consequence(failure):
        return failure
    for worker in left_early:
        tail = failures.take_last_lines(host_names.replace_names(output.tail(worker.node, worker.rank)))
        cause = failures.find_early_exit_failure(
            failure, node=worker.node, rank=worker.rank, early_exit=hang.describe_early_exit(worker), tail=tail
        )
        if cause is not None:
            return replace(cause, log=str(output.path(worker.node, worker.rank)))
    return failure


def _add_log_details(failure: Failure, output: WorkerOutput, host_names: HostNames) -> Failure:
    """Return the failure with the details from the logs."""
    if failure.exit_code is None:
        return failure
    named_by_agent = False
    if failure.rank is None:
        failure = failures.find_torchrun_failure(failure, output.tail(failure.node, AGENT))
        named_by_agent = failure.rank is not None
    rank = AGENT if failure.rank is None else failure.rank
    tail = failures.take_last_lines(host_names.replace_names(output.tail(failure.node, rank)))
    if not tail and named_by_agent:  # Its output has no more than the table that was read.
        summary = f"it {failures.describe_failure(failure)}, and had printed nothing"
        return replace(failure, summary=summary, log=str(output.path(failure.node, AGENT)))
    if not tail:  # If the worker has printed nothing, torchrun's agent may have.
        tail = failures.take_last_lines(host_names.replace_names(output.tail(failure.node, AGENT)))
    log_summary, reason = failures.find_error_line(tail), failure.node_reason
    if failure.signal is not None and not failures.is_error_line(log_summary):  # what it printed last is no cause
        ended = reason or failures.describe_failure(failure)
        summary = f"{ended}; its last line: {log_summary}" if log_summary else ended
    else:
        summary = f"{log_summary} ({reason})" if log_summary and reason else log_summary or reason
    return replace(failure, tail=tail, summary=summary, log=str(output.path(failure.node, rank)))
