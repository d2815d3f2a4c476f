"""Machine with Slurm's commands: this one, or a login node over SSH."""

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
"""Limit on the bytes of a command's output in addition to its answer; more is not read."""
SANDBOX = "sandbox"
"""Value of `cluster.login` for the sandbox that was started with --slurm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Result of a command."""

    code: int
    data: bytes
    """Output of the command."""
    err: str

    @property
    def out(self) -> str:
        """Output of the command as text."""
        return _decode_text(self.data)


class CommandHost(Protocol):
    """Machine on which commands run and which has the run's folder."""

    @property
    def name(self) -> str:
        """Name for messages: that of the login node, or `this machine`."""
        ...

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", limit_s: float = LIMIT_S) -> CommandResult:
        """Run a command to its end; the exit code is 127 if there is no such program.

        Raises:
            LaunchError: the command does not end in time.
            ConnectError: the machine cannot be reached.
        """
        ...

    @property
    def target(self) -> Target:
        """The machine, for `transport`."""
        ...

    @property
    def transport(self) -> Transport:
        """Transport to the machine."""
        ...

    def close(self) -> None:
        """Close the connection to the machine."""
        ...


@dataclass(frozen=True, slots=True)
class LocalCommandHost:
    """Command host that is this machine."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for Slurm's commands, in addition to those of this process."""
    name: str = "this machine"

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", limit_s: float = LIMIT_S) -> CommandResult:
        """See `CommandHost`."""
        try:
            done = subprocess.run(
                [*argv], input=stdin, capture_output=True, env={**os.environ, **self.env}, timeout=limit_s, check=False,
                start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise _timeout_error(argv, limit_s, self.name) from None
        except FileNotFoundError:
            return CommandResult(code=127, data=b"", err=f"{argv[0]}: not found")
        return CommandResult(code=done.returncode, data=done.stdout, err=_decode_text(done.stderr))

    @property
    def target(self) -> Target:
        """See `CommandHost`."""
        return Target(name="slurm", address="")

    @property
    def transport(self) -> Transport:
        """See `CommandHost`."""
        from dtctl.transport.local import LocalTransport

        return LocalTransport()

    def close(self) -> None:
        """See `CommandHost`."""


class LoginCommandHost:
    """Command host that is a login node; a lost connection is opened again."""

    def __init__(self, target: Target, transport: Transport) -> None:
        self.target = target
        self.transport = transport
        self._connection: Connection | None = None

    @property
    def name(self) -> str:
        """See `CommandHost`."""
        return self.target.name

    def connection(self) -> Connection:
        """Return the open connection.

        Raises:
            TransportError: no connection can be opened; the class names the reason.
        """
        if self._connection is None or not self._connection.alive():
            self.close()
            self._connection = self.transport.connect(self.target)
        return self._connection

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", limit_s: float = LIMIT_S) -> CommandResult:
        """See `CommandHost`."""
        stream = self.connection().open(shell.join_command(argv))
        try:
            stream.write(stdin)
            stream.close_stdin()
            out, err = _read_command_output(stream, limit_s)
            code = stream.exit_status(limit_s)
        finally:
            stream.close()
        if code is None:
            if self._connection is not None and self._connection.alive():
                raise _timeout_error(argv, limit_s, self.name)
            raise ConnectError("the link was lost", node=self.name)
        return CommandResult(code=code, data=out, err=_decode_text(err))

    def close(self) -> None:
        """See `CommandHost`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _read_command_output(stream: ByteStream, limit_s: float) -> tuple[bytes, bytes]:
    deadline = time.monotonic() + limit_s
    out, err = bytearray(), bytearray()
    while (chunk := stream.read(1 << 18)) and time.monotonic() < deadline and len(out) <= BYTES:
        out += chunk
        err += stream.read_stderr()
        del err[:-STDERR_BYTES]
    stream.exit_status(2.0)  # its last output on standard error arrives before its status
    return bytes(out), bytes(err) + stream.read_stderr()


def _timeout_error(argv: Sequence[str], limit_s: float, machine: str) -> LaunchError:
    return LaunchError(
        f"{argv[0]} did not answer within {limit_s:g} s", where=machine, hint="is slurmctld up? try sinfo"
    )


def _decode_text(data: bytes) -> str:
    return data.decode(errors="replace")


def choose_slurm_host(spec: Spec) -> CommandHost:
    """Return the machine with Slurm's commands that the spec names.

    Raises:
        LaunchError: the machine is a sandbox without Slurm, or the user has not agreed to the machines that the spec
            names.
    """
    trust.require_user_agreement(
        spec
    )  # a request to Slurm submits the spec's job, or reads a configuration that could run commands
    login = spec.cluster.login
    if login is None:
        return LocalCommandHost()
    if login == SANDBOX:
        return LocalCommandHost(_sandbox_env(), name="the sandbox")
    from dtctl.launch.cluster import build_target, make_ssh_transport

    cluster = spec.cluster
    target = build_target(cluster, login, address=login, user=cluster.user, port=cluster.port)
    return LoginCommandHost(target, make_ssh_transport([target], cluster.ssh))


def _sandbox_env() -> dict[str, str]:
    from dtctl.sandbox import control, slurm

    sandbox = control.find_running_sandbox(control.choose_default_name())
    env = slurm.build_slurm_environment(sandbox) if sandbox else {}
    if not env:
        raise LaunchError(
            "the sandbox is not up with Slurm",
            where="cluster.login",
            hint="`dtctl sandbox down`, then `sudo dtctl sandbox up --slurm`",
        )
    return env
