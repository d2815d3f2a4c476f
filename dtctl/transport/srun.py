"""The nodes of a Slurm allocation: commands are job steps next to the others that run there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from dtctl.errors import ConnectError
from dtctl.transport.base import Target
from dtctl.transport.local import LocalConnection, LocalStream

STEPS_PER_S: Final = 50.0
"""Most that are begun in a second, for the sake of Slurm's controller: a launch begins one on each node."""
UNBOUND: Final = b"srun: cluster configuration lacks support for cpu binding\n"
"""Message of srun where tasks are not bound anyway."""


class SrunConnection(LocalConnection):
    """One node; its streams are srun's, which is a child of this process."""

    def __init__(self, target: Target, job: str, take_turn: Callable[[], None]) -> None:
        super().__init__(target)
        self._job, self._take_turn = job, take_turn

    def peer_address(self) -> str:
        """See `dtctl.transport.base.Connection`."""
        try:
            return str(socket.getaddrinfo(self.target.address, 22, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as exc:
            raise ConnectError(
                f"the name {self.target.address} cannot be resolved here: {exc}", node=self.target.name
            ) from None

    def open(self, command: str) -> LocalStream:
        """See `dtctl.transport.base.Connection`."""
        placement = ["--jobid", self._job, "--nodelist", self.target.name, "--nodes=1", "--ntasks=1"]
        # Overlap: the job's own steps hold all its processors, and this one has them, too. All variables, whatever the
        # options of sbatch. No wait for a node that has stopped answering.
        options = ["--overlap", "--mem=0", "--cpu-bind=none", "--export=ALL", "--quiet", "--unbuffered"]
        options += ["--job-name=dtctl-node"]  # as accounting shows the step
        self._take_turn()
        return self.start(["srun", *placement, *options, "/bin/sh", "-c", command], noise=UNBOUND)


class SrunTransport:
    """Connects to nodes of one job."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock, self._next = threading.Lock(), 0.0

    def connect(self, target: Target) -> SrunConnection:
        """See `dtctl.transport.base.Transport`."""
        return SrunConnection(target, self._job, self._take_turn)

    def _take_turn(self) -> None:
        """Wait until another step may be begun."""
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + 1 / STEPS_PER_S
        time.sleep(max(0.0, turn - time.monotonic()))
