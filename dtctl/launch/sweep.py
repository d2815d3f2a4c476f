"""Ending a run that its launcher can no longer end, and proving that nothing of it is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtctl.errors import DtctlError
from dtctl.launch.control.link import open_node
from dtctl.supervisor.messages.setup import Sweep, Swept
from dtctl.transport.base import Target, Transport
from dtctl.transport.fanout import fan_out

ANSWER_S = 60.0
"""Seconds that a node may take beyond the grace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTarget:
    """One node of a run that is to be ended."""

    target: Target
    python: str | None
    workdir: str


def sweep(
    nodes: Sequence[SweepTarget], transport: Transport, *, run: str, token: str, grace_s: float, by: str = ""
) -> Mapping[str, int | DtctlError]:
    """End a run on all nodes at once; return node -> processes left there, or the error.

    Args:
        nodes: the run's nodes; the answer has their order.
        transport: how to reach them.
        run: run id.
        token: the mark of the run's processes.
        grace_s: seconds between SIGTERM and SIGKILL.
        by: requester of the end, for the run's launcher; empty when that is gone or informed.
    """
    message = Sweep(run=run, token=token, grace_s=grace_s, by=by)

    def sweep_one(node: SweepTarget) -> int:
        silence_s = grace_s + ANSWER_S
        with open_node(
            transport, node.target, message, python=node.python, workdir=node.workdir, silence_s=silence_s
        ) as link:
            return link.expect(Swept).left

    return fan_out({node.target.name: node for node in nodes}, sweep_one)
