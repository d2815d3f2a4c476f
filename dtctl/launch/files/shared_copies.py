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
from dtctl.transport.base import Target, Transport

ROUND_S: Final = 5.0
"""Seconds between two looks at what workers have written."""
NAMED: Final = 3
"""Nodes that a note names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Files of a node, as it listed them last."""

    files: NodeFiles
    at_s: float


class SharedCopies:
    """See `Copies` in dtctl/launch/control/launch_job.py."""

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
        """Copy nothing yet.

        Args:
            run: the run.
            roots: shared folders, each with the pattern of the spec; none: a resume may report that they are missing.
            transport: the way to nodes.
            targets: of nodes and spares.
            spares: nodes that stand by.
            is_resumed: whether the run continues an earlier one.
        """
        self._run, self._roots, self._transport = run, list(roots), transport
        self._targets, self._spares = targets, list(spares)
        self._is_resumed = is_resumed
        self._notes: queue.SimpleQueue[tuple[str | None, str]] = queue.SimpleQueue()
        self._amounts: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._told: set[object] = set()
        self._seen: dict[str, _Seen] = {}
        self._rounds: CopyRounds | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = threading.Event()

    def begin(self, nodes: Sequence[NodePlan], *, ended_s: float | None) -> bool:
        """See `Copies`."""
        is_needed = ended_s is not None or self._is_resumed
        if not self._roots or not is_needed:
            return False
        chosen = self._nodes_of(nodes)
        stopped_s = ended_s if ended_s is not None else 0.0

        def copy(rounds: CopyRounds) -> None:
            began = time.monotonic()
            lost = self._lost_nodes(chosen)
            result = rounds.run(chosen, stopped_s=stopped_s, lost=lost)
            self._seen = {}
            self._tell(result)
            if result.files:
                seconds = max(1e-3, time.monotonic() - began)
                self._notes.put((None, f"copied {result.files} files of job.shared, {_amount(result.bytes, seconds)}"))

        self._start(copy, share=1.0)
        return True

    def is_done(self) -> bool:
        """See `Copies`."""
        return self._thread is None or not self._thread.is_alive()

    def watch(self, nodes: Callable[[], Sequence[NodePlan]], *, is_again: bool) -> None:
        """See `Copies`."""
        self.stop()
        if self._roots:
            self._start(lambda rounds: self._copy_beside(rounds, nodes), share=SHARE_BESIDE)
        elif is_again:
            self._start(lambda rounds: self._look_for_unshared(rounds, nodes()), share=1.0)

    def stop(self) -> None:
        """See `Copies`."""
        self._is_stopped.set()
        if self._rounds is not None:
            self._rounds.close()
            self._rounds = None

    def take_notes(self) -> list[tuple[str | None, str]]:
        """See `Copies`."""
        notes = []
        while not self._notes.empty():
            notes.append(self._notes.get())
        return notes

    def take_amount(self) -> tuple[int, float]:
        """See `Copies`."""
        size, seconds = 0, 0.0
        while not self._amounts.empty():
            more_bytes, more_s = self._amounts.get()
            size, seconds = size + more_bytes, seconds + more_s
        return size, seconds

    def _start(self, action: Callable[[CopyRounds], None], *, share: float) -> None:
        """Let a thread copy, until `stop`."""
        self.stop()
        stopped = self._is_stopped = threading.Event()
        rounds = self._rounds = CopyRounds(self._run, self._roots, self._transport, share=share)

        def work() -> None:
            try:
                action(rounds)
            except Exception as exc:  # noqa: BLE001 - also a bug here must not end the run
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
        """Return nodes that were listed before and are not among these."""
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
                if name in taking_part:  # a spare has written nothing that could go with it
                    self._seen[name] = _Seen(files=files, at_s=began)
            self._tell(result)
            if result.bytes:
                self._amounts.put((result.bytes, result.seconds))

    def _tell(self, result: CopyResult) -> None:
        for root, rule in sorted(result.rules):
            self._tell_once(
                None, f"checkpoints in {root}/ are complete {RULE_NAMES.get(rule, f'by {rule} (job.shared)')}"
            )
        for node, text in result.notes:
            self._tell_once(node, text)

    def _tell_once(self, node: str | None, text: str) -> None:
        if (node, text) not in self._told:
            self._told.add((node, text))
            self._notes.put((node, text))

    def _look_for_unshared(self, rounds: CopyRounds, nodes: Sequence[NodePlan]) -> None:
        """Report the key `job.shared` if a job is resumed with checkpoints that other nodes do not have."""
        began = time.monotonic()
        chosen = [node for node in self._nodes_of(nodes) if not node.is_spare]
        result = rounds.run(chosen, stopped_s=None)
        since_s = time.monotonic() - began
        before = [
            NodeFiles(
                node=each.node,
                store=each.store,
                files={path: file for path, file in each.files.items() if file.age_s > since_s},
            )
            for each in result.listed.values()
        ]
        if len(before) < len(chosen):
            return
        for folder, holders in find_unshared(before).items():
            names = ", ".join(holders[:NAMED]) + (f" and {len(holders) - NAMED} others" if len(holders) > NAMED else "")
            only = f"on {names} only" if len(holders) < len(chosen) else "different on each node"
            self._tell_once(
                None,
                f"checkpoints in {folder}/ are {only}, and workers elsewhere do not find them: "
                f"`job.shared: [{folder}/]` brings them to all nodes",
            )


def _amount(size_bytes: int, seconds: float) -> str:
    return f"{size_bytes / 1e6:,.1f} MB in {seconds:.1f} s ({size_bytes / 1e6 / seconds:,.0f} MB/s)"
