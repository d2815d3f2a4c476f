"""Copies of `job.shared` in the course of a run: the calls before, in and after an attempt, and the notes."""

from __future__ import annotations

import time

from dtctl.launch.control.launch_job import CheckpointCopies
from dtctl.launch.control.run_nodes import RunNodes
from dtctl.launch.records.events import Note
from dtctl.launch.records.ledger import Ledger
from dtctl.plan.model import Plan

WAIT_S = 0.1
"""Seconds between two checks whether the nodes have the checkpoints that they lacked."""


class CheckpointCopier:
    """Copies of checkpoints on all nodes of a run; see `CheckpointCopies` in launch_job.py."""

    def __init__(self, nodes: RunNodes, copies: CheckpointCopies, ledger: Ledger) -> None:
        self._nodes, self._copies, self._ledger = nodes, copies, ledger
        self._ended: float | None = None
        """Time when the workers of the previous attempt ended, by the monotonic clock."""

    def copy_earlier_files(self, plan: Plan) -> None:
        """Bring files of the last attempt, or of an earlier run, to all nodes, and keep the links alive meanwhile."""
        copies, gang = self._copies, self._nodes.gang
        ended_s = None if self._ended is None else time.monotonic() - self._ended
        if not copies.begin(plan.nodes, ended_s=ended_s):
            return
        self._ledger.enter("copy")
        while not copies.is_done() and not gang.signals:
            gang.wait_with_keepalive(WAIT_S)
            self.report()
        if gang.signals:
            copies.stop()
        self.report()

    def watch(self) -> None:
        """Copy all files that the workers of an attempt write from now on."""
        self._copies.watch(lambda: self._nodes.plan.nodes)

    def report(self) -> None:
        """Emit notes about copies, and count the copied bytes."""
        for node, text in self._copies.pop_copy_notes():
            self._nodes.emit(Note(node=node, text=text))
        size_bytes, seconds = self._copies.pop_copied_amount()
        self._ledger.copied_bytes += size_bytes
        self._ledger.copied_s += seconds

    def end_attempt(self) -> None:
        """End the copies of an attempt whose workers have ended."""
        self._ended = time.monotonic()
        self.stop()
        self.report()

    def stop(self) -> None:
        """End all copies that have not finished."""
        self._copies.stop()
