"""Processes of a job that are left on its nodes when Slurm reports its end; the number is counted, not assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtctl.errors import LaunchError, TransportError
from dtctl.printable import format_count
from dtctl.slurm import remote_commands
from dtctl.slurm.answers import JobFacts, JobProcessCounts
from dtctl.slurm.site import CommandHost


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverProcesses:
    """Processes of a job that are left."""

    counts: Mapping[str, int | None]
    """Counts by node; None where they could not be counted."""
    evidence: str
    """Method of counting, or the reason why it failed."""

    @property
    def total(self) -> int | None:
        """Number of processes on all nodes; None if they could not be counted on one of them."""
        if not self.counts and self.evidence:
            return None
        counted = [count for count in self.counts.values() if count is not None]
        return sum(counted) if len(counted) == len(self.counts) else None

    def describe(self) -> str:
        """Return the numbers in words."""
        nodes = format_count(len(self.counts), "node")
        if not self.counts and not self.evidence:
            return "0 processes left: the job was never given a node"
        if not self.counts:
            return f"the processes left could not be counted: {self.evidence}"
        if self.total is None:
            blind = ", ".join(node for node, count in self.counts.items() if count is None)
            return f"the processes left on {blind} could not be counted: {self.evidence}"
        return f"{format_count(self.total, 'process', 'processes')} left on {nodes}: {self.evidence}"


def end_left_processes(
    site: CommandHost, python: str, job: str, state: JobFacts, nodes: Sequence[str]
) -> LeftoverProcesses:
    """Count and end the processes that a job has left on its nodes.

    Args:
        site: machine with Slurm's commands.
        python: Python interpreter on that machine.
        job: id of the job.
        state: Slurm's report of the job (slurm_commands.py).
        nodes: all nodes that the job has had.
    """
    if not nodes:
        # Only a record of Slurm that has no node and no earlier start shows that the job never had a node.
        never = state.node_list == "(null)" and state.restarts == "0"
        return LeftoverProcesses(
            counts={}, evidence="" if never else "Slurm no longer lists the nodes that the job had"
        )
    try:
        answer = remote_commands.send_login_request(
            site, python, JobProcessCounts,
            ids=state.ids or [job], nodes=list(nodes), partition=state.partition, account=state.account, qos=state.qos,
        )  # fmt: skip
    except (LaunchError, TransportError) as exc:
        return LeftoverProcesses(counts=dict.fromkeys(nodes), evidence=str(exc))
    return LeftoverProcesses(counts=answer.left, evidence=answer.how)
