"""Which ranks live on which node. Pure arithmetic; the order is that of the spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtctl.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The workers of one node."""

    node: str
    node_rank: int
    slots: int
    first_rank: int


def place(slots: Mapping[str, int]) -> tuple[Placement, ...]:
    """Give every worker a rank: node by node in the order of `slots`, and on a node by local rank.

    Args:
        slots: node name -> number of workers, in the order of the spec.

    Raises:
        PlanError: there is no node, or a node has no worker.
    """
    if not slots:
        raise PlanError("the job has no nodes", hint="name them under `cluster.nodes` or with `--nodes`")
    placements = []
    first_rank = 0
    for node_rank, (node, count) in enumerate(slots.items()):
        if count < 1:
            raise PlanError(
                f"node {node} has {count} slots", where=f"node {node}", hint="leave it out of `cluster.nodes`"
            )
        placements.append(Placement(node=node, node_rank=node_rank, slots=count, first_rank=first_rank))
        first_rank += count
    return tuple(placements)


def world_size(placements: Sequence[Placement]) -> int:
    """Number of workers of the job."""
    return sum(placement.slots for placement in placements)


def require_equal_slots(placements: Sequence[Placement], *, kind: str) -> int:
    """Workers per node, the same on all nodes.

    Raises:
        PlanError: they differ. torchrun derives ranks from one number per node.
            Source: torch/distributed/run.py, notice 5, read at torch 2.13.
    """
    counts = {placement.slots for placement in placements}
    if len(counts) > 1:
        listed = ", ".join(f"{placement.node}: {placement.slots}" for placement in placements)
        raise PlanError(
            f"kind {kind} needs the same number of slots on every node, and these have {listed}",
            where="cluster.slots",
            hint="`job.kind: direct` starts the workers without torchrun and allows unequal slots",
        )
    return counts.pop()
