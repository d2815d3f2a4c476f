"""Replacement of lost nodes while the workers of the other nodes wait."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dtctl.launch.control.launch_job import make_start_message
from dtctl.launch.control.run_nodes import RunNodes
from dtctl.launch.control.session import NodeSession
from dtctl.launch.records.events import NodeReplaced
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.run_writer import RunWriter
from dtctl.supervisor.messages.attempt import Attach, StandBy
from dtctl.supervisor.messages.setup import NodeDescription

if TYPE_CHECKING:
    from dtctl.launch.control.attempt import Attempt
    from dtctl.launch.control.attempts import AttemptTracker
    from dtctl.launch.control.node_pool import NodePool, ReplacementNode
    from dtctl.launch.control.worker_replacement import WorkerReplacement
    from dtctl.plan.model import Plan


class NodeReplacer:
    """Replacement of lost nodes by other nodes."""

    def __init__(self, nodes: RunNodes, attempts: AttemptTracker, record: RunWriter, ledger: Ledger) -> None:
        self._nodes, self._attempts, self._record, self._ledger = nodes, attempts, record, ledger
        self.attempt: Attempt | None = None
        """The current attempt; None before the first one."""

    @cached_property
    def pool(self) -> NodePool:
        """Lost nodes that are called again, and spares."""
        from dtctl.launch.control.node_pool import NodePool  # Few runs need this module.
        from dtctl.launch.control.spare_pool import SparePool

        nodes = self._nodes
        return NodePool(nodes.gang, SparePool(list(nodes.job.spares), nodes.emit), nodes.call, self._warm_up)

    def make_healing(self, plan: Plan) -> WorkerReplacement:
        """Return the object that replaces lost workers of an attempt."""
        from dtctl.launch.control.worker_replacement import WorkerReplacement  # Few runs need this module.

        nodes = self._nodes
        return WorkerReplacement(
            nodes.gang,
            {rank: node.name for node in plan.nodes for rank in node.ranks},
            limit_s=nodes.job.heal_s,
            ledger=self._ledger,
            address=lambda name: nodes.address(nodes.known()[name]),
            pool=None if nodes.job.keep else self.pool,
            place=self._place_substitute,
        )

    def _place_substitute(self, substitute: ReplacementNode, epoch: int) -> None:
        """Replace a lost node by another one, and start the workers of an epoch there.

        Raises:
            WorkerNotReplaced: the node cannot run the same workers.
        """
        lost, name = substitute.lost, substitute.session.name
        nodes = self._nodes
        known = nodes.known()
        assert substitute.description is not None  # noqa: S101  # it was prepared
        new = nodes.plan_with(lost, name, substitute.description)
        order = [node.name for node in new.nodes]
        sessions = nodes.gang.sessions | {name: substitute.session}
        nodes.gang.sessions = {each: sessions[each] for each in order}
        if name != lost:
            nodes.replaced[lost] = known[lost]
            nodes.replaced.pop(name, None)
            nodes.emit(NodeReplaced(node=lost, by=name, reason=substitute.reason))
        nodes.plan = new
        self._record.write_plan(new, nodes.host_names)
        if self.attempt is not None:
            self.attempt.nodes.replace_node(lost, name, new)
        node = next(node for node in new.nodes if node.name == name)
        committed_step = self._attempts.committed_step
        message = make_start_message(nodes.job, new, node, committed_step=committed_step, live_epoch=epoch)
        substitute.session.send(message)
        substitute.session.send(Attach(run=nodes.job.run, offsets=nodes.offsets(name)))

    def _warm_up(self, session: NodeSession, description: NodeDescription) -> None:
        """Let a spare import the workers' modules with the plan of the last node, as the node to be lost is unknown.

        Raises:
            WorkerNotReplaced: the spare cannot run the same workers.
        """
        nodes = self._nodes
        plan = nodes.plan_with(nodes.plan.nodes[-1].name, session.name, description)
        session.send(
            make_start_message(
                nodes.job, plan, plan.nodes[-1], committed_step=self._attempts.committed_step, kind=StandBy
            )
        )
