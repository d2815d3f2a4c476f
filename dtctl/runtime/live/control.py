"""Notice of a lost peer, wherever a worker is: a thread that sleeps until the node's supervisor writes.

    from the supervisor                             to the supervisor
    {"op": "heal", "epoch": E, "host": rank}        {"state": "hosting", "port": N}    of the new group's store
                                                    {"state": "ready", "step": N}      at the beginning of a step
                                                    {"state": "unable", "why": text}   only a restart helps
    {"op": "join", "epoch": E, "address", "port"}   {"state": "joined", "step": N, "repeats": flag}
                                                    {"state": "failed"}                to join; another epoch follows
                                                    {"state": "cut"}                   peers are gone, no heal yet
    {"op": "end"}                                   (no healing: what was met is raised)

Each message is a line of JSON in a named pipe, one per worker and one back, in a folder of the supervisor's; those to
the supervisor also have `rank`, `epoch` and `pid`.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dtctl import names
from dtctl.runtime.console import say
from dtctl.runtime.live import sockets, stuck

REPORTS: Final = "reports"
"""The pipe to the supervisor, which repeats the name."""
UNANNOUNCED_S: Final = 300.0
"""Seconds that a worker waits for a healing after its collective has failed. The worker reports the failure. The
launcher begins a healing when it has found the lost worker, or after `cluster.link_timeout_s` without a loss, or ends
the attempt."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Meeting point of the workers of an epoch."""

    epoch: int
    address: str
    port: int


class Control:
    """The link of this worker to its supervisor.

    Attributes:
        newcomer: whether this process takes the place of a lost one and has not joined the others yet.
        joined: epoch of the group that this worker is in, or was last to be in; 0 for that of the start.
        trains: whether this worker takes part in healings: not while it starts, nor after its training.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, *, epoch: int) -> None:
        """Begin to listen.

        Args:
            folder: of the pipes.
            rank: of this worker.
            world_size: number of workers.
            epoch: that this process was started for; 0 unless it replaces another one.
        """
        self._rank, self._world_size = rank, world_size
        self._changed = threading.Condition()
        self._wanted, self._ended = epoch, False
        self._answered = 0
        """The newest epoch for which this worker is out of its step."""
        self._meeting: Meeting | None = None
        self._group = self._before = sockets.Sockets()
        self._is_joining = False
        self._more = 0
        """Process groups that were made beside that of all workers, and not by the program."""
        self.newcomer, self.joined, self.trains = epoch > 0, 0, False
        self._store: TCPStore | None = None
        self._store_sockets = sockets.Sockets()
        self._hosted = 0
        self._reports = os.open(folder / REPORTS, os.O_RDWR | os.O_CLOEXEC)
        pipe = os.open(folder / f"rank-{rank}", os.O_RDWR | os.O_CLOEXEC)  # to write as well: there is never an end
        threading.Thread(target=self._listen, args=(pipe,), name="live", daemon=True).start()

    @classmethod
    def of(cls, environ: Mapping[str, str], rank: int, world_size: int) -> Control | None:
        """Return the link that the supervisor has set up; None if it has none."""
        folder = environ.get(names.LIVE)
        if not folder or world_size == 1:
            return None
        return cls(Path(folder), rank, world_size, epoch=int(environ.get(names.LIVE_EPOCH, "0")))

    def report(self, state: str, **facts: Any) -> None:
        """Send a state to the supervisor, in a line short enough that a pipe does not mix lines of several workers."""
        line = {"rank": self._rank, "pid": os.getpid(), "epoch": self._wanted, "state": state, **facts}
        os.write(self._reports, json.dumps(line).encode() + b"\n")

    # -- the group ----------------------------------------------------------------------------------------------------

    def joining(self, epoch: int = 0) -> None:
        """A group is about to be made: all sockets from now on are its own until `is_joined`."""
        with self._changed:
            self._before, self._is_joining, self.joined = sockets.opened(), True, epoch
            self._more = 0

    def is_joined(self) -> bool:
        """Return the group is made; whether it still counts, and no other worker was lost meanwhile."""
        with self._changed:
            self._group, self._is_joining = sockets.opened() - self._before, False
            if self.is_wanted:
                sockets.shut_down(self._group)
            return not self.is_wanted

    @contextmanager
    def making_groups(self) -> Iterator[None]:
        """Return the context for making further process groups, such as those of a mesh; they end with the first one.

        The sockets of these groups cannot be told from others that are opened inside, so all count as theirs.
        """
        count = _count_groups()
        with self._changed:
            before, self._is_joining = sockets.opened(), True
        try:
            yield
        finally:
            with self._changed:
                self._group |= sockets.opened() - before
                self._more += _count_groups() - count
                self._is_joining = False
                if self.is_wanted:
                    sockets.shut_down(self._group)

    def has_own_groups(self) -> bool:
        """Return whether the program has made process groups of its own."""
        return _count_groups() > 1 + self._more

    def meet(self, step: int, obstacle: Callable[[], str]) -> Meeting | None:
        """Report that this worker is ready for another group, and wait until all workers are.

        Args:
            step: steps that this worker has completed; -1 for none.
            obstacle: returns why this worker cannot be healed, or "" if it can. Called once a healing is announced.

        Returns:
            The meeting of the workers; None if there is to be no healing.
        """
        told, self._answered = self.joined, self._wanted
        if not self.is_wanted:
            self.report("cut")
        deadline = time.monotonic() + UNANNOUNCED_S
        with self._changed:
            while not self._ended:
                if self._wanted > told:
                    told = self._answered = self._wanted
                    if why := obstacle():
                        self.report("unable", why=why[:1000])
                        return None
                    self.report("ready", step=step)
                if self._meeting is not None and self._meeting.epoch == self._wanted > self.joined:
                    return self._meeting
                if told == self.joined and time.monotonic() > deadline:
                    return None
                self._changed.wait(1.0)
        return None

    def refuse(self, why: str) -> None:
        """Report that this worker cannot be healed."""
        self.report("unable", why=why)

    def store_of(self, meeting: Meeting) -> TCPStore | None:
        """Return the store of an epoch, if this worker hosts it."""
        return self._store if self._hosted == meeting.epoch else None

    @property
    def is_wanted(self) -> bool:
        """Return whether a healing has been announced that this worker has not taken part in."""
        return self._wanted > self.joined

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _listen(self, pipe: int) -> None:
        received = b""
        while True:
            received += os.read(pipe, 1 << 16)
            *lines, received = received.split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            if message["op"] == "end":
                self._ended = True
            elif message["op"] == "heal" and message["epoch"] > self._wanted:
                self._wanted = message["epoch"]
                if not (self.trains or self.newcomer):
                    self.report("unable", why="this worker is not training yet, or not any more")
                self._free()
                threading.Thread(target=self._watch, args=(self._wanted,), name="live-watch", daemon=True).start()
                if message["host"] == self._rank:
                    self._host()
            elif message["op"] == "join":
                self._meeting = Meeting(message["epoch"], message["address"], message["port"])
            self._changed.notify_all()

    def _free(self) -> None:
        """Wake the main thread if it waits for a peer."""
        if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
            # By NCCL's documentation, and not run here: it frees kernels that wait, which closing sockets does not.
            dist.distributed_c10d._abort_process_group()
        # The sockets of the program's own groups are unknown; with such groups all workers are restarted anyway.
        all_since = self._is_joining or self.has_own_groups()
        sockets.shut_down(sockets.opened() - self._before if all_since else self._group)
        # It is older than the group that is made with it, and a wait in it is a wait for a peer as well.
        sockets.shut_down(self._store_sockets)

    def _watch(self, epoch: int) -> None:
        """End this process, for a replacement, if the main thread is in a wait that cannot end."""
        if stuck.is_stuck(lambda: self._answered < epoch == self._wanted):
            say("gloo does not end a send whose connection is gone; this worker gives way to another one")
            os.kill(os.getpid(), signal.SIGKILL)

    def _host(self) -> None:
        """Open the store of the next group, on a port that the system chooses.

        It need not outlive this worker: without it there is another epoch, and another store.
        """
        before = sockets.opened()
        self._store = TCPStore("127.0.0.1", 0, self._world_size, is_master=True, wait_for_workers=False)
        self._store_sockets = sockets.opened() - before
        self._hosted = self._wanted
        self.report("hosting", port=self._store.port)


def _count_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)
