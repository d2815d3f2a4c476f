"""The watch over an attempt's progress: when it stands still, where every worker stands is asked, and kept.

What counts as a hang, and who is to blame, is decided in hang.py; here messages are sent and collected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtctl.errors import LaunchError
from dtctl.launch import hang
from dtctl.launch.failure import Failure
from dtctl.launch.hang import HangLimit, Stack
from dtctl.launch.progress import Standing, standings

LIMIT_S = 6.0
"""How long the nodes may take to tell where their workers stand."""
FRESH_S = 4.0
"""Older news of a node is no ground for a verdict; whether the node is lost is somebody else's question."""

Watched = Callable[[Sequence[Standing]], None]


class Inquest:
    """What is known of the workers of one attempt, and the question to them if they hang."""

    def __init__(self, *, world_size: int, limit: HangLimit, folder: Path, on_progress: Watched | None) -> None:
        """Nothing is known yet.

        Args:
            world_size: workers of the attempt.
            limit: `job.hang_s`.
            folder: where stacks are kept, if there will be any.
            on_progress: told how far the workers are, whenever a node says so.
        """
        self.world_size = world_size
        self.limit: HangLimit = limit
        self.folder = folder
        self.on_progress = on_progress
        self.workers: dict[int, Standing] = {}
        self.silent_s: float | None = None
        """For how long nothing had moved when the question was asked; None: it was not."""
        self._heard: dict[str, float] = {}
        self._stacks: dict[int, Stack] = {}
        self._asked: set[str] = set()
        self._deadline = 0.0

    def told(self, node: str, facts: Sequence[dict[str, Any]]) -> None:
        """A node says how far its workers are."""
        if self.silent_s is not None:
            return  # what is judged is how things stood when the question was asked
        self._heard[node] = time.monotonic()
        found = standings(node, facts)
        self.workers |= {worker.rank: worker for worker in found}
        if found and self.on_progress is not None:
            self.on_progress(found)

    def ended(self, rank: int) -> None:
        """A worker has ended well; the others may go on."""
        if self.workers.pop(rank, None) is not None:
            self.world_size -= 1

    def hangs(self, now: float) -> bool:
        """Whether the attempt hangs, and the workers should be asked where they stand."""
        if self.silent_s is not None or any(
            now - self._heard.get(worker.node, 0.0) > FRESH_S for worker in self.workers.values()
        ):
            return False
        self.silent_s = hang.silence(self.workers.values(), world_size=self.world_size, limit=self.limit)
        return self.silent_s is not None

    def ask(self, nodes: Collection[str]) -> None:
        """The question was sent to these nodes."""
        self._asked = set(nodes)
        self._deadline = time.monotonic() + LIMIT_S

    def shown(self, fact: dict[str, Any]) -> None:
        """A worker's stack has come."""
        self._stacks[fact["rank"]] = Stack(
            state=fact["state"], how=fact["how"], text=fact["text"], flight=fact["flight"]
        )

    def answered(self, node: str) -> None:
        """A node has shown all that it can."""
        self._asked.discard(node)

    def verdict(self, now: float) -> Failure | None:
        """Who is to blame, as soon as all have answered or had their time; what they have shown is kept then."""
        if self.silent_s is None or (self._asked and now < self._deadline):
            return None
        found = hang.failure(self.workers.values(), self._stacks, silent_s=self.silent_s, now=time.time())
        for rank, stack in sorted(self._stacks.items()):
            try:
                path = hang.keep(self.folder, self.workers[rank].node, rank, stack)
            except (LaunchError, OSError):
                continue  # a full disk; the verdict is worth more
            if rank == found.rank:
                found = replace(found, log=str(path))
        return found
