"""Monitors an attempt's progress: when there is none, every worker's stack is requested and saved.

What counts as a hang, and who is to blame, is decided in hang.py; here messages are sent and collected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtctl.errors import LaunchError
from dtctl.launch import hang
from dtctl.launch.failure import Failure
from dtctl.launch.hang import HangLimit, Stack
from dtctl.launch.progress import Standing, standings, unheard

LIMIT_S = 6.0
"""How long the nodes may take to tell where their workers stand."""
FRESH_S = 4.0
"""Older news of a node is no ground for a verdict; whether the node is lost is somebody else's question."""

Watched = Callable[[Sequence[Standing]], None]


class HangMonitor:
    """The last report of each worker of one attempt, and the stacks that are requested if they hang."""

    def __init__(
        self,
        *,
        node_of_rank: Mapping[int, str],
        limit: HangLimit,
        start_limit: HangLimit,
        folder: Path,
        on_progress: Watched | None,
    ) -> None:
        """Nothing is known yet.

        Args:
            node_of_rank: workers of the attempt, rank -> node.
            limit: `job.hang_s`.
            start_limit: `job.hang_start_s`.
            folder: where stacks are kept, if there will be any.
            on_progress: told how far the workers are, whenever a node says so.
        """
        self.node_of_rank = node_of_rank
        self.limit: HangLimit = limit
        self.start_limit: HangLimit = start_limit
        self.folder = folder
        self.on_progress = on_progress
        self.workers: dict[int, Standing] = {}
        self.silent_s: float | None = None
        """For how long nothing had moved when the question was asked; None: it was not."""
        self._ended: set[int] = set()
        """Ranks that have ended well."""
        self._before_stop: dict[int, Standing] | None = None
        self._last_report: dict[str, float] = {}
        self._stacks: dict[int, Stack] = {}
        self._awaited: set[str] = set()
        self._deadline = 0.0

    def update(self, node: str, facts: Sequence[dict[str, Any]], *, before_stop: bool = False) -> None:
        """A node says how far its workers are; `before_stop`: before it has asked them to end."""
        if before_stop and self._before_stop is not None:
            self._before_stop |= {worker.rank: self._as_ended(worker) for worker in standings(node, facts)}
        if self.silent_s is not None:
            return  # what is judged is how things stood when the question was asked
        self._last_report[node] = time.monotonic()
        reports = standings(node, facts)
        self.workers |= {worker.rank: self._as_ended(worker) for worker in reports}
        if reports and self.on_progress is not None:
            self.on_progress(reports)

    def _as_ended(self, worker: Standing) -> Standing:
        """Its number may be another process's by now."""
        return replace(worker, state="") if worker.rank in self._ended else worker

    def worker_ended(self, rank: int) -> None:
        """A worker has ended well; the others may go on without it, or wait for it."""
        if rank not in self.node_of_rank:
            return  # torchrun's agent
        self._ended.add(rank)
        worker = self.workers.get(rank) or unheard(self.node_of_rank[rank], rank)
        self.workers[rank] = self._as_ended(worker)

    def left_early(self) -> list[Standing]:
        """Workers that had left, when the attempt was ended, though their training had steps left; by rank.

        Their exit codes may be any; torchrun keeps them to itself.
        """
        workers = self.workers if self._before_stop is None else self._before_stop
        return hang.left_early(workers.values())

    def stopping(self) -> None:
        """The nodes are asked to end the attempt; whoever ends from now on may do so because of that."""
        if self._before_stop is None:
            self._before_stop = dict(self.workers)

    def hangs(self, now: float) -> bool:
        """Whether the attempt hangs, and the workers should be asked where they stand."""
        if self.silent_s is not None or any(
            now - self._last_report.get(worker.node, 0.0) > FRESH_S
            for worker in self.workers.values()
            if not worker.exited
        ):
            return False
        self.silent_s = hang.silence(
            self.workers.values(), world_size=len(self.node_of_rank), limit=self.limit, start_limit=self.start_limit
        )
        return self.silent_s is not None

    def begin_collecting(self, nodes: Collection[str]) -> None:
        """Stacks were requested from these nodes."""
        self._awaited = set(nodes)
        self._deadline = time.monotonic() + LIMIT_S

    def add_stack(self, fact: dict[str, Any]) -> None:
        """A worker's stack has arrived."""
        self._stacks[fact["rank"]] = Stack(
            state=fact["state"], tool=fact["how"], text=fact["text"], flight=fact["flight"]
        )

    def node_finished(self, node: str) -> None:
        """A node has sent all of its stacks."""
        self._awaited.discard(node)

    def verdict(self, now: float) -> Failure | None:
        """The culprit, once all nodes have answered or the time limit has passed; the stacks are saved then."""
        if self.silent_s is None or (self._awaited and now < self._deadline):
            return None
        silent = {rank: node for rank, node in self.node_of_rank.items() if rank not in self.workers}
        failure = hang.failure(
            self.workers.values(), self._stacks, silent_s=self.silent_s, now=time.time(), silent=silent
        )
        for rank, stack in sorted(self._stacks.items()):
            try:
                path = hang.write_stack(self.folder, self.workers[rank].node, rank, stack)
            except (LaunchError, OSError):
                continue  # a full disk; the verdict is worth more
            if rank == failure.rank:
                failure = replace(failure, log=str(path))
        return failure
