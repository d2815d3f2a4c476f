"""The nodes of a Slurm allocation: commands are job steps next to the others that run there.

The first command on each node is a task of one step for all of them (dtctl/slurm/job_step.py), if the transport knows
which nodes there are. Each further one is a step of its own.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from dtctl.errors import ConnectError
from dtctl.transport.base import ByteStream, Target
from dtctl.transport.local import LocalConnection

STEPS_PER_S: Final = 50.0
"""Most steps that are started per second, to protect Slurm's controller: a launch starts one on each node."""
UNBOUND: Final = b"srun: cluster configuration lacks support for cpu binding\n"
"""Message of srun on clusters that do not bind tasks."""


# --overlap: the job's own steps occupy all its processors, and this step uses the same ones. --export=ALL: options of
# sbatch may exclude variables.
OPTIONS: Final = ("--overlap", "--mem=0", "--cpu-bind=none", "--export=ALL", "--quiet", "--job-name=dtctl-node")


class CommonStep(Protocol):
    """A job step with a task on each node."""

    def open(self, node: str, command: str) -> ByteStream | None:
        """Start a command on a node by its task; return None if it has no task, or no longer."""
        ...


class SrunConnection(LocalConnection):
    """Connection to a node; its streams are srun's, which is a child of this process."""

    def __init__(self, target: Target, job: str, take_turn: Callable[[], None], step: CommonStep | None) -> None:
        super().__init__(target)
        self._job, self._take_turn, self._step = job, take_turn, step

    def peer_address(self) -> str:
        """See `dtctl.transport.base.Connection`."""
        try:
            return str(socket.getaddrinfo(self.target.address, 22, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as exc:
            raise ConnectError(
                f"the name {self.target.address} cannot be resolved here: {exc}", node=self.target.name
            ) from None

    def open(self, command: str) -> ByteStream:
        """See `dtctl.transport.base.Connection`."""
        stream = self._step.open(self.target.name, command) if self._step is not None else None
        if stream is not None:
            self.streams.append(stream)
            return stream
        placement = ["--jobid", self._job, "--nodelist", self.target.name, "--nodes=1", "--ntasks=1"]
        self._take_turn()
        argv = ["srun", *placement, *OPTIONS, "--unbuffered", "/bin/sh", "-c", command]
        return self.start(argv, noise=UNBOUND)


class SrunTransport:
    """Connects to nodes of one job."""

    def __init__(self, job: str, step: CommonStep | None = None) -> None:
        self._job, self._step = job, step
        self._lock, self._next = threading.Lock(), 0.0

    def connect(self, target: Target) -> SrunConnection:
        """See `dtctl.transport.base.Transport`."""
        return SrunConnection(target, self._job, self._take_turn, self._step)

    def _take_turn(self) -> None:
        """Wait until another step may be started."""
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + 1 / STEPS_PER_S
        time.sleep(max(0.0, turn - time.monotonic()))
