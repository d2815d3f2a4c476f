"""The nodes of a run, with their links, their descriptions and their places in the plan."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import TYPE_CHECKING

from dtctl.errors import PlanError
from dtctl.launch.control.launch_job import LaunchJob
from dtctl.launch.control.node_sessions import NodeSessions
from dtctl.launch.control.session import NodeMessage, NodeSession, NodeSetup
from dtctl.launch.records.events import Emit, Note
from dtctl.launch.records.logs import RunLogs
from dtctl.plan import rendezvous
from dtctl.plan.model import NodePlan, Plan
from dtctl.supervisor.frames import AGENT
from dtctl.supervisor.messages.attempt import Attach
from dtctl.supervisor.messages.setup import EndOrphanedRun, NodeDescription, Prepare

if TYPE_CHECKING:
    from dtctl.launch.control.attempt_nodes import AttemptOutcome
    from dtctl.launch.control.node_pool import ReconnectPolicy

NODES_NAMED = 4
"""Most nodes that a note names; for more, it has their number."""


class RunNodes:
    """The nodes of a run, from the first connection to the last."""

    def __init__(
        self, job: LaunchJob, *, logs: RunLogs, emit: Emit, signals: list[int], under_way: Plan | None
    ) -> None:
        """Open sessions without calling a node; `under_way`: plan of an attempt that nodes continue."""
        self.job, self.logs, self.emit = job, logs, emit
        self.plan = job.first_plan
        """Plan of the current attempt; after its end, of the last one."""
        self.inbox: queue.Queue[NodeMessage] = queue.Queue(maxsize=10_000)
        self.gang = NodeSessions(
            [self.open_session(node) for node in job.first_plan.nodes], self.inbox, logs=logs, emit=emit
        )
        self.gang.signals = signals
        self.gang.time_s = job.time_s
        self.descriptions: dict[str, NodeDescription] = {}
        """Reports of the nodes about themselves."""
        self.earlier_host_names: dict[str, str] = {}
        """Host names of the nodes, as recorded by an earlier launcher."""
        self.replaced: dict[str, NodePlan] = {}
        """Nodes that took part earlier and no longer do."""
        self._visited = {node.name for plan in (job.first_plan, under_way) if plan is not None for node in plan.nodes}
        """Nodes that may have files or processes of the run."""

    @property
    def host_names(self) -> dict[str, str]:
        """Return the host name of each node."""
        return self.earlier_host_names | {name: each.host for name, each in self.descriptions.items() if each.host}

    def known(self) -> dict[str, NodePlan]:
        """Return all nodes that take part, took part or can take part."""
        return {**self.job.spares, **self.replaced, **{node.name: node for node in self.plan.nodes}}

    def gpus(self) -> dict[str, int]:
        """Return the number of GPUs of each node that has reported it."""
        return {name: description.gpus for name, description in self.descriptions.items()}

    def address(self, head: NodePlan) -> str:
        """Return the numeric address of the head node for the other nodes."""
        first = self.job.first_plan
        planned = (
            first.rendezvous.address
            if head.name == first.head.name
            else rendezvous.resolve_numeric_address(head.address)
        )
        if (self.job.fixed_address and head.name == first.head.name) or rendezvous.is_numeric(planned):
            return planned
        # Behind a jump host the name is valid only there; the node reports the address at which it was reached.
        description = self.descriptions.get(head.name)
        return (description.address if description is not None else "") or planned

    def open_session(
        self,
        node: NodePlan,
        *,
        is_new: bool = True,
        attach: Attach | None = None,
        code: str = "",
        sweep: EndOrphanedRun | None = None,
    ) -> NodeSession:
        """Return a new session with a node, without starting it."""
        job = self.job
        head = node.node_rank == 0

        def prepare(cwd: str) -> Prepare:
            return Prepare(
                run=job.run,
                fresh=is_new and not job.is_shared,
                cwd=cwd,
                pushed=not job.code_folder,
                shared=job.is_shared,
                files=list(node.files),
                programs=list(node.programs),
                path=node.path,
                outputs=list(job.outputs),
                earlier=job.earlier,
                replicated=[path for path, _ in job.shared],
                data=job.data(),
                environment=job.environment(),
            )

        setup = NodeSetup(
            python=node.python,
            workdir=node.workdir,
            ports=rendezvous.list_rendezvous_ports(job.run, job.first_plan.attempt, job.fixed_port) if head else (),
            push=job.push,
            prepare=prepare,
            code=code or job.code_folder,
            attach=attach,
            sweep=sweep,
            environment=job.environment_digest,
        )
        return NodeSession(job.targets[node.name], job.transport, setup, self.inbox)

    def call(self, name: str, rule: ReconnectPolicy) -> NodeSession:
        """Open a session with a node that was lost or is a spare; see `NodePool`."""
        from dtctl.launch.control.node_pool import KEPT, LIVE

        attach = Attach(run=self.job.run, offsets=self.offsets(name)) if rule is KEPT else None
        is_new = name not in self._visited
        self._visited.add(name)
        sweep = (
            EndOrphanedRun(run=self.job.run, token=self.job.token, grace_s=0.0) if rule is LIVE and not is_new else None
        )
        node, code = self.known()[name], self._code_on(name)
        return self.open_session(node, is_new=is_new, attach=attach, code=code, sweep=sweep)

    def _code_on(self, name: str) -> str:
        """Return the folder of the code on a node; empty if the code was not brought there."""
        return self.gang.sessions[name].code if name in self.gang.sessions else ""

    def offsets(self, name: str) -> dict[str, int]:
        """Return how much of each rank's output has arrived from a node."""
        return {str(rank): size for rank, size in self.logs.offsets.get(name, {}).items() if rank >= AGENT}

    def plan_with(self, lost: str, name: str, description: NodeDescription) -> Plan:
        """Return the current plan with another node instead of a lost one.

        Raises:
            WorkerNotReplaced: the other node cannot run the same workers.
        """
        from dtctl.launch.control.spare_pool import WorkerNotReplaced

        plan, meeting = self.plan, self.plan.rendezvous
        order = [name if node.name == lost else node.name for node in plan.nodes]
        self.descriptions[name] = description
        address = self.address(self.known()[name]) if lost == plan.head.name else meeting.address
        try:
            new = self.job.make_plan(
                plan.attempt, order, address, meeting.port, gpus=self.gpus(), threads=plan.threads
            )  # fmt: skip
        except PlanError as exc:
            raise WorkerNotReplaced(f"{name} does not fit: {exc.message}") from exc
        if [node.ranks for node in new.nodes] != [node.ranks for node in plan.nodes]:
            raise WorkerNotReplaced(f"{name} does not have as many workers as {lost}")
        return new

    def report_other_runs(self) -> None:
        """Emit a note about other runs on these nodes."""
        nodes: dict[str, list[str]] = {}
        for node in self.job.first_plan.nodes:
            description = self.descriptions.get(node.name)
            for run in description.running if description is not None else ():
                nodes.setdefault(run, []).append(node.name)
        for run in sorted(nodes.keys() - {self.job.run}):
            where = ", ".join(nodes[run]) if len(nodes[run]) <= NODES_NAMED else f"{len(nodes[run])} of these nodes"
            self.emit(Note(text=f"{run} is running on {where}, too: both share their GPUs, cores and memory"))

    def sweep_lost(self, outcome: AttemptOutcome) -> None:
        """End the processes that are left on nodes whose link was lost, if they can be reached again."""
        plan = self.plan
        outcome.left_behind |= dict.fromkeys(self.replaced)
        nodes = [*plan.nodes, *self.replaced.values()]
        unreachable = [
            node for node in nodes if node.name in outcome.left_behind and outcome.left_behind[node.name] is None
        ]
        if not unreachable or self.job.keep:
            return
        from dtctl.launch.orphaned_runs import OrphanedRunNode, sweep_nodes

        targets = [
            OrphanedRunNode(
                target=replace(self.job.targets[node.name], connect_timeout_s=3.0),
                python=node.python,
                workdir=node.workdir,
            )
            for node in unreachable
        ]
        grace_s = min(plan.grace_s, 3.0)
        answers = sweep_nodes(targets, self.job.transport, run=plan.run, token=self.job.token, grace_s=grace_s)
        for name, answer in answers.items():
            if isinstance(answer, int):
                outcome.left_behind[name] = answer
