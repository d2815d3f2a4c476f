"""Notification of a lost peer at any point of training, by a thread that reads from the node's supervisor.

    from the supervisor                             to the supervisor
    {"op": "heal", "epoch": E, "host": rank}        {"state": "hosting", "port": N}    of the new group's store
                                                    {"state": "ready", "step": N}      at the beginning of a step
                                                    {"state": "unable", "why": text}   only a restart helps
    {"op": "join", "epoch": E, "address", "port"}   {"state": "joined", "step": N, "repeats": flag}
                                                    {"state": "failed"}                no group; another epoch follows
                                                    {"state": "cut"}                   peers are gone, no "heal" yet
    {"op": "end"}                                   (no replacement: the error is raised)

Each message is a line of JSON in a named pipe in a folder of the supervisor. Each worker has a pipe to read from, and
all share one to the supervisor, whose messages also have `rank`, `epoch` and `pid`.
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
"""Name of the pipe to the supervisor, which defines the same name."""
UNANNOUNCED_S: Final = 300.0
"""Seconds that a worker waits for a replacement to be announced after its collective has failed. The worker reports the
failure. The launcher then announces a replacement when it has found the lost worker, or after `cluster.link_timeout_s`
without a loss, or ends the attempt."""


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """Meeting point of the workers of an epoch."""

    epoch: int
    address: str
    port: int


class SupervisorLink:
    """The link of this worker to its supervisor.

    Attributes:
        newcomer: True if this process replaces a lost worker and has not joined the others yet.
        joined: epoch of the group that this worker is in, or was in last; 0 for the group of the start.
        trains: True if this worker can take part in a replacement: not while it starts, nor after its training.
        obstacle: reason why it cannot, while `trains` is false.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, *, epoch: int) -> None:
        """Start the thread that reads messages.

        Args:
            folder: folder of the pipes.
            rank: rank of this worker.
            world_size: number of workers.
            epoch: epoch for which this process was started; 0 unless it replaces another process.
        """
        self._rank, self._world_size = rank, world_size
        self._changed = threading.Condition()
        self._wanted, self._ended = epoch, False
        self._answered = 0
        """Newest epoch for which this worker has left its step."""
        self._meeting: RendezvousPoint | None = None
        self._group = self._before = sockets.Sockets()
        self._is_joining = False
        self._more = 0
        """Number of process groups that dtctl has made in addition to that of all workers."""
        self.newcomer, self.joined, self.trains = epoch > 0, 0, False
        self.obstacle = "this worker is not training yet, or not any more"
        self._store: TCPStore | None = None
        self._store_sockets = sockets.Sockets()
        self._hosted = 0
        self._reports = os.open(folder / REPORTS, os.O_RDWR | os.O_CLOEXEC)
        # open for writing too, so that reads never return the end
        pipe = os.open(folder / f"rank-{rank}", os.O_RDWR | os.O_CLOEXEC)
        threading.Thread(target=self._read_supervisor_messages, args=(pipe,), name="live", daemon=True).start()

    @classmethod
    def build_from_environ(cls, environ: Mapping[str, str], rank: int, world_size: int) -> SupervisorLink | None:
        """Return the link that the supervisor has set up; None if there is none."""
        folder = environ.get(names.LIVE)
        if not folder or world_size == 1:
            return None
        return cls(Path(folder), rank, world_size, epoch=int(environ.get(names.LIVE_EPOCH, "0")))

    def report(self, state: str, **facts: Any) -> None:
        """Send a state to the supervisor, as one short line, so that a pipe does not mix lines of several workers."""
        line = {"rank": self._rank, "pid": os.getpid(), "epoch": self._wanted, "state": state, **facts}
        os.write(self._reports, json.dumps(line).encode() + b"\n")

    # -- the group ----------------------------------------------------------------------------------------------------

    def joining(self, epoch: int = 0) -> None:
        """Begin to make a group: all sockets that are opened before `is_joined` count as sockets of the group."""
        with self._changed:
            self._before, self._is_joining, self.joined = sockets.list_open_sockets(), True, epoch
            self._more = 0

    def is_joined(self) -> bool:
        """Note that the group is made; return False if another worker was lost meanwhile."""
        with self._changed:
            self._group, self._is_joining = sockets.list_open_sockets() - self._before, False
            if self.is_wanted:
                sockets.shut_down(self._group)
            return not self.is_wanted

    @contextmanager
    def making_groups(self) -> Iterator[None]:
        """Return the context for making more process groups, such as those of a mesh; they end with the first one.

        All sockets that are opened inside count as sockets of these groups, because there is no way to distinguish
        others.
        """
        count = _count_groups()
        with self._changed:
            before, self._is_joining = sockets.list_open_sockets(), True
        try:
            yield
        finally:
            with self._changed:
                self._group |= sockets.list_open_sockets() - before
                self._more += _count_groups() - count
                self._is_joining = False
                if self.is_wanted:
                    sockets.shut_down(self._group)

    def has_own_groups(self) -> bool:
        """Return whether the program has made process groups of its own."""
        return _count_groups() > 1 + self._more

    def wait_for_meeting(self, step: int, obstacle: Callable[[], str]) -> RendezvousPoint | None:
        """Report that this worker is ready for a new group, and wait until all workers are.

        Args:
            step: number of steps that this worker has completed; -1 for none.
            obstacle: returns the reason why this worker cannot continue without a restart, or "". Called once a
                replacement is announced.

        Returns:
            The meeting point of the workers; None if there is no replacement.
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

    def get_hosted_store(self, meeting: RendezvousPoint) -> TCPStore | None:
        """Return the store of an epoch if this worker hosts it, else None."""
        return self._store if self._hosted == meeting.epoch else None

    @property
    def is_wanted(self) -> bool:
        """Return whether a replacement is announced in which this worker has not taken part."""
        return self._wanted > self.joined

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _read_supervisor_messages(self, pipe: int) -> None:
        received = b""
        while True:
            received += os.read(pipe, 1 << 16)
            *lines, received = received.split(b"\n")
            for line in lines:
                self._handle_supervisor_message(json.loads(line))

    def _handle_supervisor_message(self, message: dict[str, Any]) -> None:
        with self._changed:
            if message["op"] == "end":
                self._ended = True
            elif message["op"] == "heal" and message["epoch"] > self._wanted:
                self._wanted = message["epoch"]
                if not (self.trains or self.newcomer):
                    self.report("unable", why=self.obstacle)
                self._wake_main_thread()
                threading.Thread(
                    target=self._exit_if_stuck, args=(self._wanted,), name="live-watch", daemon=True
                ).start()
                if message["host"] == self._rank:
                    self._open_group_store()
            elif message["op"] == "join":
                self._meeting = RendezvousPoint(message["epoch"], message["address"], message["port"])
            self._changed.notify_all()

    def _wake_main_thread(self) -> None:
        """Wake the main thread if it waits for a peer."""
        if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
            # According to NCCL's documentation (not tested here) this frees waiting kernels, which closing sockets does
            # not.
            dist.distributed_c10d._abort_process_group()
        # The sockets of the program's own groups are unknown; with such groups all workers are restarted anyway.
        all_since = self._is_joining or self.has_own_groups()
        sockets.shut_down(sockets.list_open_sockets() - self._before if all_since else self._group)
        # The store is older than the group that is made with it, and a wait in the store is a wait for a peer as well.
        sockets.shut_down(self._store_sockets)

    def _exit_if_stuck(self, epoch: int) -> None:
        """End this process, so that it is replaced, if the main thread is in a wait that cannot end."""
        if stuck.is_stuck(lambda: self._answered < epoch == self._wanted):
            say("gloo does not end a send whose connection is gone; this worker will be replaced")
            os.kill(os.getpid(), signal.SIGKILL)

    def _open_group_store(self) -> None:
        """Open the store of the next group on a port that the system chooses.

        It need not outlive this worker: if the worker is lost, there is another epoch with another store.
        """
        before = sockets.list_open_sockets()
        self._store = TCPStore("127.0.0.1", 0, self._world_size, is_master=True, wait_for_workers=False)
        self._store_sockets = sockets.list_open_sockets() - before
        self._hosted = self._wanted
        self.report("hosting", port=self._store.port)


def _count_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)
