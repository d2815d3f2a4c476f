"""The processes of a job that are left on its nodes when Slurm reports its end: counted, never assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtctl.errors import LaunchError, TransportError
from dtctl.slurm import login_client
from dtctl.slurm.answers import Counted, JobFacts
from dtctl.slurm.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
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
        nodes = "1 node" if len(self.counts) == 1 else f"{len(self.counts)} nodes"
        if not self.counts and not self.evidence:
            return "0 processes left: the job was never given a node"
        if not self.counts:
            return f"the processes left could not be counted: {self.evidence}"
        if self.total is None:
            blind = ", ".join(node for node, count in self.counts.items() if count is None)
            return f"the processes left on {blind} could not be counted: {self.evidence}"
        return f"{self.total} processes left on {nodes}: {self.evidence}"


def look(site: Site, python: str, job: str, state: JobFacts, nodes: Sequence[str]) -> Left:
    """Count and end the processes that a job has left on its nodes.

    Args:
        site: where Slurm's commands are.
        python: interpreter there.
        job: its id.
        state: Slurm's report of it (slurm_commands.py).
        nodes: all that it was ever given.
    """
    if not nodes:
        # Only a record of Slurm's without a node, and without another start before it, shows that there was none.
        never = state.node_list == "(null)" and state.restarts == "0"
        return Left(counts={}, evidence="" if never else "Slurm does not say any more which nodes the job had")
    try:
        answer = login_client.ask(
            site, python, Counted,
            ids=state.ids or [job], nodes=list(nodes), partition=state.partition, account=state.account, qos=state.qos,
        )  # fmt: skip
    except (LaunchError, TransportError) as exc:
        return Left(counts=dict.fromkeys(nodes), evidence=str(exc))
    return Left(counts=answer.left, evidence=answer.how)
