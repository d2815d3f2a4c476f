"""The failure that an attempt ended with, from the nodes' reports, the logs and the workers that had left early."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from dtctl.launch.control import failure as failures
from dtctl.launch.control import hang
from dtctl.launch.control.failure import AGENT, Failure
from dtctl.launch.control.progress import Standing
from dtctl.launch.records.host_names import HostNames


class Output(Protocol):
    """Output of the workers in the attempt; rank -1 is torchrun's agent."""

    def tail(self, node: str, rank: int) -> str:
        """Return the end of it."""
        ...

    def path(self, node: str, rank: int) -> Path:
        """Return the file that it is in."""
        ...


def first_failure(
    reported: Iterable[Failure],
    left_early: Iterable[Standing],
    output: Output,
    host_names: HostNames | None = None,
) -> Failure | None:
    """Return the failure that the others follow from; None when there was none.

    Args:
        reported: what has failed in the attempt.
        left_early: workers that had left although their training had steps left, and have not failed.
        output: of the workers.
        host_names: how the nodes call themselves, which gives way to their names in what workers have printed.
    """
    host_names = host_names or HostNames({})
    failure = failures.first(_explained(failure, output, host_names) for failure in reported)
    if failure is None or not failures.is_consequence(failure):
        return failure
    for worker in left_early:
        tail = failures.last_lines(host_names.replace_names(output.tail(worker.node, worker.rank)))
        cause = failures.from_early_exit(
            failure, node=worker.node, rank=worker.rank, early_exit=hang.early_exit(worker), tail=tail
        )
        if cause is not None:
            return replace(cause, log=str(output.path(worker.node, worker.rank)))
    return failure


def _explained(failure: Failure, output: Output, host_names: HostNames) -> Failure:
    """Return the failure with the details from the logs."""
    if failure.exit_code is None:
        return failure
    named_by_agent = False
    if failure.rank is None:
        failure = failures.from_torchrun(failure, output.tail(failure.node, AGENT))
        named_by_agent = failure.rank is not None
    rank = AGENT if failure.rank is None else failure.rank
    tail = failures.last_lines(host_names.replace_names(output.tail(failure.node, rank)))
    if not tail and named_by_agent:  # the agent's table of failures has been read, and has nothing more
        summary = f"it {failures.describe(failure)}, and had printed nothing"
        return replace(failure, summary=summary, log=str(output.path(failure.node, AGENT)))
    if not tail:  # a worker without output; torchrun's agent may have some
        tail = failures.last_lines(host_names.replace_names(output.tail(failure.node, AGENT)))
    log_summary, reason = failures.summary(tail), failure.node_reason
    summary = f"{log_summary} ({reason})" if log_summary and reason else log_summary or reason
    return replace(failure, tail=tail, summary=summary, log=str(output.path(failure.node, rank)))
