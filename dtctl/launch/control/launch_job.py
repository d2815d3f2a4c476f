"""All data that a launch on nodes needs, decided before the first connection, and the messages for each node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import dtctl
from dtctl import names
from dtctl.launch.control.failure import AGENT
from dtctl.launch.control.gang import PING_S
from dtctl.launch.control.hang import HangLimit
from dtctl.launch.control.link import NodeLink
from dtctl.launch.records.events import PushProgress, PushReport
from dtctl.plan import environment
from dtctl.plan.model import NodePlan, Plan, Threads
from dtctl.supervisor.messages.attempt import RunOrigin, StartAttempt, WorkerSpec
from dtctl.supervisor.messages.setup import DataLink, EnvironmentOrder
from dtctl.transport.base import Target, Transport


class MakePlan(Protocol):
    """Function that makes the plan of an attempt, with facts that only the nodes have."""

    def __call__(
        self,
        attempt: int,
        nodes: Sequence[str],
        address: str,
        port: int,
        *,
        gpus: Mapping[str, int],
        cores: Mapping[str, int] | None = None,
        threads: Threads | None = None,
    ) -> Plan:
        """See `PlanFacts` for what is known of nodes; these are in rank order, the first has the address."""


Push = Callable[[NodeLink, PushReport], PushProgress]


class Copies(Protocol):
    """Copies of what workers write into the folders of `job.shared`; each method returns at once."""

    def begin(self, nodes: Sequence[NodePlan], *, ended_s: float | None) -> bool:
        """Begin to copy what nodes lack before an attempt; False if there is nothing to be done.

        Args:
            nodes: of the attempt.
            ended_s: seconds since the workers of the attempt before ended; None before the first one.
        """

    def is_done(self) -> bool:
        """Return whether the nodes have what they lacked."""

    def watch(self, nodes: Callable[[], Sequence[NodePlan]], *, is_again: bool) -> None:
        """Copy what workers write while they run.

        Args:
            nodes: returns those of the attempt, which may change.
            is_again: whether workers may look for what was written before.
        """

    def stop(self) -> None:
        """End all copies that are on."""

    def take_notes(self) -> Sequence[tuple[str | None, str]]:
        """Return notes for the user since the last call: node, or None, and text."""

    def take_amount(self) -> tuple[int, float]:
        """Return the bytes that were copied since the last call while workers ran, and the seconds that it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """All data that `launch` needs, decided before the first connection."""

    run: str
    token: str
    first_plan: Plan
    """The plan as a dry run shows it."""
    make_plan: MakePlan
    make_script: Callable[[Plan, NodePlan], str]
    transport: Transport
    targets: Mapping[str, Target]
    """Targets of nodes and spares."""
    spares: Mapping[str, NodePlan]
    """Nodes that stand by, in the order in which they are used; their ranks mean nothing."""
    min_nodes: int
    """Nodes that the run needs."""
    return_s: float
    """Seconds for which nodes that the run needs are called again when they are lost."""
    push: Push | None
    data: Callable[[], list[DataLink]] = list
    """Files in addition to the code, once they are known."""
    environment: Callable[[], EnvironmentOrder | None] = lambda: None
    """Order of the environment that nodes make before the workers start, once the first of them was asked."""
    environment_digest: str = ""
    """Digest of the environment, which is known before; empty: the job has no environment."""
    code_folder: str = ""
    """Place where the code lies on every node, if it is not pushed."""
    is_shared: bool = False
    """True if that is one folder for all nodes, in which the workers start, and what nodes keep is the run's alone."""
    fixed_port: int | None
    fixed_address: str
    """The head node's address, if the spec names it, so that the nodes need not be asked; empty: they are."""
    secrets: Mapping[str, str]
    link_timeout_s: float
    hang_s: HangLimit
    hang_start_s: HangLimit
    """Limits for a job that has not made any progress yet."""
    hang_output_s: float | None
    """Seconds without output after which a job that reports no progress hangs; None: never."""
    heal_s: float
    """Seconds that replacing lost workers may take."""
    time_s: float | None
    """Seconds after which the run is stopped with snapshots; None: never."""
    trains: bool
    """True if the spec has a section `train`, which dtctl.runtime reads in the workers."""
    snapshots: Mapping[str, str]
    """Node -> folder of snapshots, of nodes that continue another run's; the others have their own run's."""
    outputs: tuple[str, ...] = ()
    """Paths in the working folder that are worth keeping; see `job.outputs`."""
    shared: tuple[tuple[str, str], ...] = ()
    """Folders of `job.shared`: path in the working folder, and name of the file that is written last; empty: none."""
    copies: Copies | None = None
    """Brings what workers write into the folders of `shared` to all nodes; None under Slurm and on one machine."""
    origin: RunOrigin | None = None
    """Launcher of the run, for other control machines."""
    log_bytes: int = 0
    """Most that is kept of the output of a rank; 0: all of it."""
    earlier: str = ""
    """Run whose outputs this run continues."""
    keep: bool
    """True if nodes continue when the link is lost (`--detach`)."""


def make_start_message(
    job: LaunchJob,
    plan: Plan,
    node: NodePlan,
    *,
    committed_step: int,
    live_epoch: int = 0,
    kind: type[StartAttempt] = StartAttempt,
) -> StartAttempt:
    """Return the message for a node.

    Args:
        job: what to run.
        plan: of the attempt.
        node: of the plan.
        committed_step: of earlier attempts; workers cannot determine it if the node with the record is gone. 0: none.
        live_epoch: how often workers of this attempt were replaced.
        kind: StandBy to import only what workers need.
    """
    history = {names.COMMITTED_STEP: str(committed_step)} if committed_step else {}
    workers = [
        WorkerSpec(
            rank=node.first_rank + local_rank if plan.kind != "torchrun" else AGENT,
            env=environment.worker_variables(
                plan.kind, rank=str(node.first_rank + local_rank), local_rank=str(local_rank)
            ),
        )
        for local_rank in range(node.processes)
    ]
    meets_here = plan.per_worker and plan.world_size > 1 and node.name == plan.head.name and not live_epoch
    return kind(
        run=plan.run,
        token=job.token,
        attempt=plan.attempt,
        script=job.make_script(plan, node),
        workers=workers,
        preload=list(node.preload),
        split_ranks=plan.kind == "torchrun",
        env={**job.secrets, **history, names.VERSION: dtctl.__version__},
        live=plan.live,
        live_epoch=live_epoch,
        outputs=list(job.outputs),
        log_bytes=job.log_bytes,
        origin=job.origin,
        peer=plan.rendezvous.address,
        meeting_port=plan.rendezvous.port if meets_here else 0,
        grace_s=plan.grace_s,
        snapshots=job.snapshots.get(node.name, ""),
        keep=job.keep,
        link_timeout_s=_fence_s(job),
    )


def _fence_s(job: LaunchJob) -> float:
    """Return the seconds of silence after which a node ends its workers: before a spare has their ranks."""
    limit_s = job.link_timeout_s
    return limit_s - min(PING_S, limit_s / 4) if job.spares else limit_s
