"""End of a run that its launcher can no longer end, with a check that none of its processes is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtctl.errors import DtctlError
from dtctl.launch.control.link import open_node
from dtctl.supervisor.messages.setup import EndOrphanedRun, OrphanedRunEnded
from dtctl.transport.base import Target, Transport
from dtctl.transport.fanout import fan_out

ANSWER_S = 60.0
"""Seconds that a node may take beyond the grace period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanedRunNode:
    """A node of a run that is to be ended."""

    target: Target
    python: str | None
    workdir: str


def sweep_nodes(
    nodes: Sequence[OrphanedRunNode], transport: Transport, *, run: str, token: str, grace_s: float, by: str = ""
) -> Mapping[str, int | DtctlError]:
    """End a run on all nodes at once; return node -> processes left there, or the error.

    Args:
        nodes: the run's nodes; the result has the same order.
        transport: transport to these nodes.
        run: run id.
        token: mark in the environment of the run's processes.
        grace_s: seconds between SIGTERM and SIGKILL.
        by: requester of the end, for the run's launcher; empty if the launcher is gone or has the request already.
    """
    message = EndOrphanedRun(run=run, token=token, grace_s=grace_s, by=by)

    def sweep_one(node: OrphanedRunNode) -> int:
        silence_s = grace_s + ANSWER_S
        with open_node(
            transport, node.target, message, python=node.python, workdir=node.workdir, silence_s=silence_s
        ) as link:
            return link.expect(OrphanedRunEnded).left

    return fan_out({node.target.name: node for node in nodes}, sweep_one)
