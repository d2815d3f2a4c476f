"""The nodes of a Slurm allocation: commands are job steps beside whatever else runs there."""

from __future__ import annotations

import socket
from typing import Final

from dtctl.errors import ConnectError
from dtctl.transport.base import Target
from dtctl.transport.local import LocalConnection, LocalStream

UNBOUND: Final = b"srun: cluster configuration lacks support for cpu binding\n"
"""What it says where tasks are not bound anyway."""


class SrunConnection(LocalConnection):
    """One node; its streams are srun's, which is a child of this process."""

    def __init__(self, target: Target, job: str) -> None:
        super().__init__(target)
        self._job = job

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
        # Overlap: the job's own steps hold all its processors, and this one has them, too. All variables, whatever
        # sbatch was told. No wait for a node that has stopped answering.
        options = ["--overlap", "--mem=0", "--cpu-bind=none", "--export=ALL", "--quiet", "--unbuffered"]
        return self.start(["srun", *placement, *options, "/bin/sh", "-c", command], noise=UNBOUND)


class SrunTransport:
    """Connects to nodes of one job."""

    def __init__(self, job: str) -> None:
        self._job = job

    def connect(self, target: Target) -> SrunConnection:
        """See `dtctl.transport.base.Transport`."""
        return SrunConnection(target, self._job)
