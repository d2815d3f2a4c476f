"""All data that a launch on nodes needs before the first connection, and the start message for each node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import dtctl
from dtctl import names
from dtctl.launch.control.hang import HangLimit
from dtctl.launch.control.link import NodeLink
from dtctl.launch.control.node_sessions import PING_S
from dtctl.launch.records.events import PushProgress, PushReport
from dtctl.plan import environment
from dtctl.plan.model import NodePlan, Plan, ThreadCount
from dtctl.supervisor.frames import AGENT
from dtctl.supervisor.messages.attempt import RunOrigin, StartAttempt, WorkerSpec
from dtctl.supervisor.messages.setup import DataLink, EnvironmentOrder
from dtctl.transport.base import Target, Transport


class PlanFactory(Protocol):
    """Function that makes the plan of an attempt from facts that only the nodes can report."""

    def __call__(
        self,
        attempt: int,
        nodes: Sequence[str],
        address: str,
        port: int,
        *,
        gpus: Mapping[str, int],
        cores: Mapping[str, int] | None = None,
        threads: ThreadCount | None = None,
    ) -> Plan:
        """Make a plan for nodes in rank order; the first one has the address. See `PlanFacts` for the other values."""


Push = Callable[[NodeLink, PushReport], PushProgress]


class CheckpointCopies(Protocol):
    """Copies of the files that workers write into the folders of `job.shared`; each method returns at once."""

    def begin(self, nodes: Sequence[NodePlan], *, ended_s: float | None) -> bool:
        """Begin to find and copy the files that nodes lack before an attempt; return False if nothing has to be done.

        Args:
            nodes: nodes of the attempt.
            ended_s: seconds since the workers of the previous attempt ended; None before the first attempt.
        """

    def is_done(self) -> bool:
        """Return whether the copies that `begin` started are done."""

    def watch(self, nodes: Callable[[], Sequence[NodePlan]]) -> None:
        """Copy the files that workers write while they run.

        Args:
            nodes: returns the nodes of the attempt, which may change.
        """

    def stop(self) -> None:
        """End all copies that have not finished."""

    def pop_copy_notes(self) -> Sequence[tuple[str | None, str]]:
        """Return notes for the user since the last call: node, or None, and text."""

    def pop_copied_amount(self) -> tuple[int, float]:
        """Return the bytes copied since the last call while workers ran, and the seconds that the copies took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """All data that a launch needs before the first connection."""

    run: str
    token: str
    first_plan: Plan
    """Plan that a dry run shows."""
    make_plan: PlanFactory
    make_script: Callable[[Plan, NodePlan], str]
    transport: Transport
    targets: Mapping[str, Target]
    """Targets of nodes and spares."""
    spares: Mapping[str, NodePlan]
    """Spare nodes, in the order in which they are used; their ranks have no meaning."""
    min_nodes: int
    """Nodes that the run needs."""
    return_s: float
    """Seconds for which the launcher calls lost nodes again that the run needs."""
    push: Push | None
    data: Callable[[], list[DataLink]] = list
    """Function that returns the links to files in addition to the code, once they are known."""
    environment: Callable[[], EnvironmentOrder | None] = lambda: None
    """Function that returns the order to make the environment before the workers start, once a node has reported."""
    environment_digest: str = ""
    """Digest of the environment, which is known before any node is called; empty: the job has no environment."""
    code_folder: str = ""
    """Folder of the code on every node, if the code is not pushed."""
    is_shared: bool = False
    """True if `code_folder` is one folder for all nodes, in which workers start; the run's folder may exist before."""
    fixed_port: int | None
    fixed_address: str
    """Address of the head node in the spec; empty: the nodes report it."""
    secrets: Mapping[str, str]
    link_timeout_s: float
    hang_s: HangLimit
    hang_start_s: HangLimit
    """Limit for a job that has not made any progress yet."""
    hang_output_s: float | None
    """Seconds without output after which a job that reports no progress hangs; None: never."""
    heal_s: float
    """Seconds that replacing lost workers may take."""
    time_s: float | None
    """Seconds after which the run is stopped with snapshots; None: never."""
    trains: bool
    """True if the spec has a section `train`, which dtctl.runtime reads in the workers."""
    snapshots: Mapping[str, str]
    """Folder of snapshots on each node that continues another run; other nodes use the folder of this run."""
    outputs: tuple[str, ...] = ()
    """Paths of `job.outputs` in the working folder."""
    shared: tuple[tuple[str, str], ...] = ()
    """Folders of `job.shared`: path in the working folder, and name of the file that is written last; empty: none."""
    copies: CheckpointCopies | None = None
    """Copies of the folders of `shared` between nodes; None under Slurm and on one machine."""
    origin: RunOrigin | None = None
    """Description of the run's launcher for other control machines."""
    log_bytes: int = 0
    """Most bytes that are kept of the output of a rank; 0: all output is kept."""
    earlier: str = ""
    """Run whose outputs this run continues."""
    keep: bool
    """True if nodes continue the run when the link is lost (`--detach`)."""


def make_start_message(
    job: LaunchJob,
    plan: Plan,
    node: NodePlan,
    *,
    committed_step: int,
    live_epoch: int = 0,
    kind: type[StartAttempt] = StartAttempt,
) -> StartAttempt:
    """Return the start message for a node.

    Args:
        job: the job to run.
        plan: plan of the attempt.
        node: the node, as in the plan.
        committed_step: step of the newest snapshot that earlier attempts committed; 0: none. Workers cannot determine
            it if the node with the commit record is gone.
        live_epoch: number of replacements of workers in this attempt.
        kind: type of the message; with StandBy the node only imports the modules that workers need.
    """
    history = {names.COMMITTED_STEP: str(committed_step)} if committed_step else {}
    workers = [
        WorkerSpec(
            rank=node.first_rank + local_rank if plan.kind != "torchrun" else AGENT,
            env=environment.build_worker_variables(
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
    """Return the seconds of silence after which a node ends its workers, so that it does so before a spare starts."""
    limit_s = job.link_timeout_s
    return limit_s - min(PING_S, limit_s / 4) if job.spares else limit_s
