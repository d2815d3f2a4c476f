"""What is launched, and how it ended. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtctl.launch.control.failure import Failure
from dtctl.launch.control.hang import HangLimit
from dtctl.launch.control.link import NodeLink
from dtctl.plan.model import NodePlan, Plan
from dtctl.transport.base import Target, Transport

MakePlan = Callable[[int, str, int, Mapping[str, int], Sequence[str]], Plan]
"""(attempt, address of the head node, port, GPUs per node, nodes in rank order) -> plan."""
Push = Callable[[NodeLink, Callable[[int], None]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """All that `launch` needs to know, decided before the first connection."""

    run: str
    token: str
    first_plan: Plan
    """The plan as a dry run shows it."""
    make_plan: MakePlan
    """Makes the plan again with what only the nodes know."""
    make_script: Callable[[Plan, NodePlan], str]
    transport: Transport
    targets: Mapping[str, Target]
    """Of nodes and spares."""
    spares: Mapping[str, NodePlan]
    """Nodes that stand by, in the order in which they are used; their ranks mean nothing."""
    min_nodes: int
    """Nodes that the run needs."""
    return_s: float
    """For how long nodes that the run needs are called again when they are lost."""
    push: Push | None
    fixed_port: int | None
    fixed_address: bool
    """Whether the spec names the head node's address itself, so that the nodes need not be asked."""
    secrets: Mapping[str, str]
    link_timeout_s: float
    hang_s: HangLimit
    hang_start_s: HangLimit
    """When a job that makes no progress hangs."""
    time_s: float | None
    """When the run is stopped with snapshots; None: never."""
    trains: bool
    """Whether the spec has a section `train`, which dtctl.runtime reads in the workers."""
    snapshots: Mapping[str, str]
    """Node -> folder of snapshots, of nodes that go on from another run's; the others have their own run's."""
    keep: bool
    """Whether nodes go on when the link is lost (`--detach`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended."""

    run: str
    status: str
    """succeeded, failed or stopped"""
    exit_code: int
    attempts: int
    first_failure: Failure | None
    launch_s: float | None
    """Seconds from the launcher's start to the last node's processes started; None if that was never reached."""
    duration_s: float
    left_behind: int | None
    """Processes of the run left on all nodes; None when a node could not be asked."""
    lost_output: Mapping[str, int] = field(default_factory=dict)
    """Node -> bytes of its workers' output that could not be stored, there or here; empty when all was."""
    nodes: int
    goodput: float | None
    """Share of the time that went into steps which count; None when the job tells no progress."""
