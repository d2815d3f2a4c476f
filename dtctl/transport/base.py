"""Interface of a transport: it starts a command on a node and exchanges bytes with it.

Code that acts on nodes uses nothing but these protocols, so it runs the same over SSH, on this machine and in tests
against a fake. One node, one `Connection`; one remote command, one `ByteStream`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Address and login of one node. None means: as `ssh NODE` would do it."""

    name: str
    """Name of the node in the spec; used in messages."""
    address: str
    """Host name, alias of the OpenSSH configuration, or numeric address."""
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    known_hosts: str | None = None
    """A file that replaces the user's and the system's known_hosts."""
    ssh_config: str | None = None
    connect_timeout_s: float = 10.0


class ByteStream(Protocol):
    """A command running on a node, with its standard input, output and error."""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes of standard output; blocks; empty when the command closed it or the link is gone.

        Raises:
            ConnectError: the node accepts logins and opens no session.
        """
        ...

    def read_stderr(self) -> bytes:
        """Return all of standard error that has arrived so far and was not read yet; never blocks for more."""
        ...

    def write(self, data: bytes) -> None:
        """Send all of `data` to standard input; blocks while the node does not read.

        Raises:
            ConnectError: the link is gone or the command no longer reads.
        """
        ...

    def close_stdin(self) -> None:
        """Close standard input: no more of it will come."""
        ...

    def exit_status(self, timeout_s: float) -> int | None:
        """Exit status of the command, 128 + N if signal N ended it; None if unknown or not ended within `timeout_s`."""
        ...

    def close(self) -> None:
        """Close the stream; the far end sees end of file. Safe to call twice."""
        ...


class Connection(Protocol):
    """An open way to one node, kept for the whole run."""

    @property
    def target(self) -> Target:
        """The node at the other end."""
        ...

    def peer_address(self) -> str:
        """Numeric address that the connection was made to; empty through a jump host or a proxy command."""
        ...

    def open(self, command: str) -> ByteStream:
        """Start `command` (shell text, made by `dtctl.shell`) on the node.

        Raises:
            ConnectError: the link is gone.
        """
        ...

    def alive(self) -> bool:
        """Return whether the link is still open, as far as this end can detect."""
        ...

    def close(self) -> None:
        """Close the link and everything opened on it. Safe to call twice."""
        ...


class Transport(Protocol):
    """Makes connections of one kind."""

    def connect(self, target: Target) -> Connection:
        """Open a connection to `target`.

        Raises:
            TransportError: of the class for the reason (see `dtctl/errors.py`).
        """
        ...
