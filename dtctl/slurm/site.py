"""The machine that Slurm's commands run on: this one, or a login node over SSH."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dtctl import shell
from dtctl.errors import ConnectError, LaunchError
from dtctl.launch import trust
from dtctl.slurm.answers import BYTES
from dtctl.spec.model import Spec
from dtctl.transport.base import ByteStream, Connection, Target, Transport

LIMIT_S = 60.0
STDERR_BYTES = 1 << 20
"""Bytes of a command's output in addition to its answer; more is not read."""
SANDBOX = "sandbox"
"""Value of `cluster.login` that means the sandbox which was started with --slurm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A command that has ended."""

    code: int
    data: bytes
    """Output of the command."""
    err: str

    @property
    def out(self) -> str:
        """The same as text."""
        return _text(self.data)


class Site(Protocol):
    """Machine on which commands run and the run's folder lies."""

    @property
    def name(self) -> str:
        """Name for messages: the login node, or `this machine`."""
        ...

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", limit_s: float = LIMIT_S) -> Done:
        """Run a command to its end; 127 when there is no such program.

        Raises:
            LaunchError: it does not end in time.
            ConnectError: the machine cannot be reached.
        """
        ...

    @property
    def target(self) -> Target:
        """The machine, for `transport`."""
        ...

    @property
    def transport(self) -> Transport:
        """The way there."""
        ...

    def close(self) -> None:
        """Close the connection to the machine."""
        ...


@dataclass(frozen=True, slots=True)
class LocalSite:
    """This machine."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for Slurm's commands, on top of this process's own."""
    name: str = "this machine"

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", limit_s: float = LIMIT_S) -> Done:
        """See `Site`."""
        try:
            done = subprocess.run(
                [*argv], input=stdin, capture_output=True, env={**os.environ, **self.env}, timeout=limit_s, check=False,
                start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise _timeout_error(argv, limit_s, self.name) from None
        except FileNotFoundError:
            return Done(code=127, data=b"", err=f"{argv[0]}: not found")
        return Done(code=done.returncode, data=done.stdout, err=_text(done.stderr))

    @property
    def target(self) -> Target:
        """See `Site`."""
        return Target(name="slurm", address="")

    @property
    def transport(self) -> Transport:
        """See `Site`."""
        from dtctl.transport.local import LocalTransport

        return LocalTransport()

    def close(self) -> None:
        """See `Site`."""


class LoginSite:
    """A login node; the connection is made again when it was lost."""

    def __init__(self, target: Target, transport: Transport) -> None:
        self.target = target
        self.transport = transport
        self._connection: Connection | None = None

    @property
    def name(self) -> str:
        """See `Site`."""
        return self.target.name

    def connection(self) -> Connection:
        """Return the open connection.

        Raises:
            TransportError: of the class for the reason why there is none.
        """
        if self._connection is None or not self._connection.alive():
            self.close()
            self._connection = self.transport.connect(self.target)
        return self._connection

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", limit_s: float = LIMIT_S) -> Done:
        """See `Site`."""
        stream = self.connection().open(shell.join(argv))
        try:
            stream.write(stdin)
            stream.close_stdin()
            out, err = _read(stream, limit_s)
            code = stream.exit_status(limit_s)
        finally:
            stream.close()
        if code is None:
            if self._connection is not None and self._connection.alive():
                raise _timeout_error(argv, limit_s, self.name)
            raise ConnectError("the link was lost", node=self.name)
        return Done(code=code, data=out, err=_text(err))

    def close(self) -> None:
        """See `Site`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _read(stream: ByteStream, limit_s: float) -> tuple[bytes, bytes]:
    deadline = time.monotonic() + limit_s
    out, err = bytearray(), bytearray()
    while (chunk := stream.read(1 << 18)) and time.monotonic() < deadline and len(out) <= BYTES:
        out += chunk
        err += stream.read_stderr()
        del err[:-STDERR_BYTES]
    stream.exit_status(2.0)  # its last output on standard error comes before its status
    return bytes(out), bytes(err) + stream.read_stderr()


def _timeout_error(argv: Sequence[str], limit_s: float, machine: str) -> LaunchError:
    return LaunchError(
        f"{argv[0]} did not answer within {limit_s:g} s", where=machine, hint="is slurmctld up? try sinfo"
    )


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def site_of(spec: Spec) -> Site:
    """Return the machine with Slurm's commands, as the spec names it.

    Raises:
        LaunchError: it is the sandbox, and that has no Slurm; or the user has not agreed to what the spec reaches.
    """
    trust.check(spec)  # a request to Slurm submits the spec's job, or reads a configuration that could run commands
    login = spec.cluster.login
    if login is None:
        return LocalSite()
    if login == SANDBOX:
        return LocalSite(_sandbox_env(), name="the sandbox")
    from dtctl.launch.cluster import ssh_transport

    cluster = spec.cluster
    target = Target(
        name=login,
        address=login,
        user=cluster.user,
        port=cluster.port,
        identity_file=str(cluster.identity_file) if cluster.identity_file else None,
        known_hosts=str(cluster.known_hosts) if cluster.known_hosts else None,
        ssh_config=str(cluster.ssh_config) if cluster.ssh_config else None,
        connect_timeout_s=cluster.connect_timeout_s,
    )
    return LoginSite(target, ssh_transport([target], cluster.ssh))


def _sandbox_env() -> dict[str, str]:
    from dtctl.sandbox import control, slurm

    sandbox = control.find(control.default_name())
    env = slurm.environment(sandbox) if sandbox else {}
    if not env:
        raise LaunchError(
            "the sandbox is not up with Slurm",
            where="cluster.login",
            hint="`dtctl sandbox down`, then `sudo dtctl sandbox up --slurm`",
        )
    return env
