"""Rounds of copies of `job.shared` in the course of a run: before each attempt, and while workers run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dtctl.launch.files.checkpoint_sets import RULE_NAMES, LostNode, NodeFiles, find_unshared
from dtctl.launch.files.shared import SHARE_BESIDE, CopyNode, CopyResult, CopyRounds
from dtctl.plan.model import NodePlan
from dtctl.printable import format_count
from dtctl.transport.base import Target, Transport

ROUND_S: Final = 5.0
"""Seconds between two lists of the files that workers have written."""
NAMED: Final = 3
"""Most nodes that a note names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeListing:
    """Newest list of a node's files."""

    files: NodeFiles
    at_s: float


class SharedCopies:
    """See `CheckpointCopies` in dtctl/launch/control/launch_job.py."""

    def __init__(
        self,
        *,
        run: str,
        roots: Sequence[tuple[str, str]],
        transport: Transport,
        targets: Mapping[str, Target],
        spares: Sequence[NodePlan],
        is_resumed: bool,
    ) -> None:
        """Prepare to copy.

        Args:
            run: the run.
            roots: shared folders, each with the pattern of the spec; empty: a resume only reports files that some nodes
                lack.
            transport: transport to the nodes.
            targets: targets of nodes and spares.
            spares: nodes that stand by.
            is_resumed: whether the run continues an earlier one.
        """
        self._run, self._roots, self._transport = run, list(roots), transport
        self._targets, self._spares = targets, list(spares)
        self._is_resumed = is_resumed
        self._notes: queue.SimpleQueue[tuple[str | None, str]] = queue.SimpleQueue()
        self._amounts: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._told: set[object] = set()
        self._seen: dict[str, _NodeListing] = {}
        self._rounds: CopyRounds | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = threading.Event()

    def begin(self, nodes: Sequence[NodePlan], *, ended_s: float | None) -> bool:
        """See `CheckpointCopies`."""
        if ended_s is None and not self._is_resumed:
            return False
        if not self._roots:
            if self._told:
                return False  # The search is made once, since it needs a login to each node.
            # This search precedes the workers: a program with its newest checkpoint in one file soon overwrites it.
            self._start_copy_thread(lambda rounds: self._look_for_unshared(rounds, nodes), share=1.0)
            return True
        chosen = self._nodes_of(nodes)
        stopped_s = ended_s if ended_s is not None else 0.0

        def copy(rounds: CopyRounds) -> None:
            began = time.monotonic()
            lost = self._lost_nodes(chosen)
            result = rounds.run(chosen, stopped_s=stopped_s, lost=lost)
            self._seen = {}
            self._report_copy_result(result)
            if ended_s is None and len(result.listed) == len(chosen):
                self._report_fresh_start(result)
            if result.files:
                seconds = max(1e-3, time.monotonic() - began)
                copied, rate = format_count(result.files, "file"), _format_transfer_rate(result.bytes, seconds)
                self._notes.put((None, f"copied {copied} of job.shared, {rate}"))

        self._start_copy_thread(copy, share=1.0)
        return True

    def is_done(self) -> bool:
        """See `CheckpointCopies`."""
        return self._thread is None or not self._thread.is_alive()

    def watch(self, nodes: Callable[[], Sequence[NodePlan]]) -> None:
        """See `CheckpointCopies`."""
        self.stop()
        if self._roots:
            self._start_copy_thread(lambda rounds: self._copy_beside(rounds, nodes), share=SHARE_BESIDE)

    def stop(self) -> None:
        """See `CheckpointCopies`."""
        self._is_stopped.set()
        if self._rounds is not None:
            self._rounds.close()
            self._rounds = None

    def pop_copy_notes(self) -> list[tuple[str | None, str]]:
        """See `CheckpointCopies`."""
        notes = []
        while not self._notes.empty():
            notes.append(self._notes.get())
        return notes

    def pop_copied_amount(self) -> tuple[int, float]:
        """See `CheckpointCopies`."""
        size, seconds = 0, 0.0
        while not self._amounts.empty():
            more_bytes, more_s = self._amounts.get()
            size, seconds = size + more_bytes, seconds + more_s
        return size, seconds

    def _start_copy_thread(self, action: Callable[[CopyRounds], None], *, share: float) -> None:
        """Start a thread that copies until `stop`."""
        self.stop()
        stopped = self._is_stopped = threading.Event()
        rounds = self._rounds = CopyRounds(self._run, self._roots, self._transport, share=share)

        def work() -> None:
            try:
                action(rounds)
            except Exception as exc:  # noqa: BLE001 - a bug in this thread must not end the run
                if not stopped.is_set():
                    self._notes.put((None, f"files of job.shared were not copied: {exc}"))
            finally:
                rounds.close()

        self._thread = threading.Thread(target=work, name="copies", daemon=True)
        self._thread.start()

    def _nodes_of(self, nodes: Sequence[NodePlan]) -> list[CopyNode]:
        taking_part = {node.name for node in nodes}
        spares = [spare for spare in self._spares if spare.name not in taking_part]
        return [
            CopyNode(
                target=self._targets[node.name],
                python=node.python,
                workdir=node.workdir,
                is_spare=node.name not in taking_part,
            )
            for node in [*nodes, *spares]
        ]

    def _lost_nodes(self, nodes: Sequence[CopyNode]) -> list[LostNode]:
        """Return the nodes that were listed before and are not among `nodes`."""
        names, now = {node.target.name for node in nodes if not node.is_spare}, time.monotonic()
        return [
            LostNode(paths=[*seen.files.files], listed_s=now - seen.at_s)
            for name, seen in self._seen.items()
            if name not in names
        ]

    def _copy_beside(self, rounds: CopyRounds, nodes: Callable[[], Sequence[NodePlan]]) -> None:
        stopped = self._is_stopped
        while not stopped.wait(ROUND_S):
            began = time.monotonic()
            plans = nodes()
            taking_part = {node.name for node in plans}
            result = rounds.run(self._nodes_of(plans), stopped_s=None)
            if stopped.is_set():
                return
            for name, files in result.listed.items():
                if name in taking_part:  # A spare has written no files that could be lost.
                    self._seen[name] = _NodeListing(files=files, at_s=began)
            self._report_copy_result(result)
            if result.bytes:
                self._amounts.put((result.bytes, result.seconds))

    def _report_copy_result(self, result: CopyResult) -> None:
        for root, rule in sorted(result.rules):
            self._tell_once(
                None, f"checkpoints in {root}/ are complete {RULE_NAMES.get(rule, f'by {rule} (job.shared)')}"
            )
        for node, text in result.notes:
            self._tell_once(node, text)

    def _report_fresh_start(self, result: CopyResult) -> None:
        """Emit a note if the earlier run has files in its shared folders, but no complete checkpoint."""
        if result.checkpoints or not any(each.files for each in result.listed.values()):
            return
        roots = ", ".join(f"{root}/" for root, _ in self._roots)
        self._tell_once(
            None, f"no checkpoint in {roots} is complete: the program starts anew, unless it keeps its state elsewhere"
        )

    def _tell_once(self, node: str | None, text: str) -> None:
        if (node, text) not in self._told:
            self._told.add((node, text))
            self._notes.put((node, text))

    def _look_for_unshared(self, rounds: CopyRounds, nodes: Sequence[NodePlan]) -> None:
        """Emit a note about `job.shared` if a job resumes from checkpoints that other nodes do not have."""
        chosen = [node for node in self._nodes_of(nodes) if not node.is_spare]
        result = rounds.run(chosen, stopped_s=None)
        if len(result.listed) < len(chosen):
            return
        for place, holders in find_unshared([*result.listed.values()]).items():
            names = ", ".join(holders[:NAMED]) + (f" and {len(holders) - NAMED} others" if len(holders) > NAMED else "")
            only = f"on {names} only" if len(holders) < len(chosen) else "different on each node"
            if place.endswith("/"):
                text = (
                    f"checkpoints in {place} are {only}, and workers elsewhere do not find them: "
                    f"`job.shared: [{place}]` brings them to all nodes"
                )
            else:
                text = (
                    f"the checkpoint {place} is {only}, and workers elsewhere do not find it: let the program write it "
                    "into a folder, such as checkpoints/, since job.shared brings folders to all nodes"
                )
            self._tell_once(None, text)


def _format_transfer_rate(size_bytes: int, seconds: float) -> str:
    return f"{size_bytes / 1e6:,.1f} MB in {seconds:.1f} s ({size_bytes / 1e6 / seconds:,.0f} MB/s)"
