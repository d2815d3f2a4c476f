"""Copies of `job.shared` in the course of a run: their place between attempts, their notes and their time."""

from __future__ import annotations

import time

from dtctl.launch.control.launch_job import Copies
from dtctl.launch.control.run_nodes import RunNodes
from dtctl.launch.records.events import Note
from dtctl.launch.records.ledger import Ledger
from dtctl.plan.model import Plan

WAIT_S = 0.1
"""Seconds between two looks at whether nodes have the checkpoints that they lacked."""


class Copying:
    """Brings checkpoints to all nodes of a run, if the job has folders with some; see `Copies` in launch_job.py."""

    def __init__(self, nodes: RunNodes, copies: Copies, ledger: Ledger) -> None:
        self._nodes, self._copies, self._ledger = nodes, copies, ledger
        self._ended: float | None = None
        """Time when the workers of the attempt before ended, by the monotonic clock."""

    def bring(self, plan: Plan) -> None:
        """Bring what the last attempt, or an earlier run, has left to all nodes; their links are kept alive."""
        copies, gang = self._copies, self._nodes.gang
        ended_s = None if self._ended is None else time.monotonic() - self._ended
        if not copies.begin(plan.nodes, ended_s=ended_s):
            return
        self._ledger.enter("copy")
        while not copies.is_done() and not gang.signals:
            gang.idle(WAIT_S)
            self.report()
        if gang.signals:
            copies.stop()
        self.report()

    def watch(self, plan: Plan) -> None:
        """Copy what the workers of an attempt write from now on."""
        job = self._nodes.job
        is_again = plan.attempt > job.first_plan.attempt or bool(job.earlier)
        self._copies.watch(lambda: self._nodes.plan.nodes, is_again=is_again)

    def report(self) -> None:
        """Emit notes about copies, and count them."""
        for node, text in self._copies.take_notes():
            self._nodes.emit(Note(node=node, text=text))
        size_bytes, seconds = self._copies.take_amount()
        self._ledger.copied_bytes += size_bytes
        self._ledger.copied_s += seconds

    def end_attempt(self) -> None:
        """End the copies of an attempt whose workers have ended."""
        self._ended = time.monotonic()
        self.stop()
        self.report()

    def stop(self) -> None:
        """End all copies that are on."""
        self._copies.stop()
