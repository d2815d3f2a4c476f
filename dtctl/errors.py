"""Every error that dtctl reports, and the exit code that each one ends a command with.

    DtctlError                    1   a bug, or an error without a better class
     +- UsageError                2   the command line does not make sense
     +- SpecError                 3   the spec: YAML, unknown key, wrong value, node range
     +- PlanError                 4   the spec is fine, but no job can be made of it
     +- RenderError               5   a template is missing, escapes its folder or uses an undefined name
     +- TransportError            6   a node, or the way to it
     |   +- ConnectError              name unknown, refused, unreachable, time-out
     |   +- AuthError                 no key or password was accepted
     |   +- HostKeyError              the node's host key is unknown or has changed
     |   +- TransferError             bytes did not arrive whole
     |   +- NodeError                 the node answered, but cannot do its part (no Python, disk full)
     |   +- NodeFailures              several nodes failed, one error each
     +- LaunchError               7   the job could not be started, or an unknown run was named
     |   +- SandboxError              the virtual hosts cannot be made or changed
     +- WorkerFailed              8   the job started, and then a worker failed
     +- DoctorFailed              9   a check (or the linter) found a failure
     +- SnapshotError            10   a snapshot is missing, damaged or does not fit
     +- Interrupted         130/143   stopped by SIGINT or SIGTERM

An error is a fact (the message), a place (`where`) and what to do next (`hint`). Other facts are attributes, so that
`--json` and tests need not parse text. Only `dtctl/cli/main.py` turns an error into an exit code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar


class DtctlError(Exception):
    """Base of all errors that dtctl reports to its user.

    Attributes:
        message: the fact, in one sentence.
        where: place of the fact: `file:line`, a node, a path; None if the message names the place.
        hint: the user's next step; None if there is nothing to add.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def extend_message(self, text: str) -> None:
        """Add more of the fact to the message."""
        self.message += text
        self.args = (self.message,)


class UsageError(DtctlError):
    """The command line does not make sense."""

    exit_code = 2


class SpecError(DtctlError):
    """The spec cannot be read, or has keys or values that are not allowed.

    Attributes:
        key: path of the key, such as `cluster.nodes[1].slots`; None if the error concerns the whole file.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, where: str | None = None, hint: str | None = None, key: str | None = None
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.key = key


class PlanError(DtctlError):
    """The spec is well formed, but no job can be made of it."""

    exit_code = 4


class RenderError(DtctlError):
    """A template is missing, outside its folder, or uses a name that does not exist."""

    exit_code = 5


class TransportError(DtctlError):
    """A node, or the connection to it, does not do its part.

    Attributes:
        node: name of the node in the spec.
    """

    exit_code = 6

    def __init__(self, message: str, *, node: str, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, where=where or f"node {node}", hint=hint)
        self.node = node


class ConnectError(TransportError):
    """The node's name is unknown, it refused, it did not answer in time, or the link was lost."""


class AuthError(TransportError):
    """The node accepted none of the keys that were offered."""


class HostKeyError(TransportError):
    """The node's host key is unknown or differs from the recorded one.

    Attributes:
        fingerprint: fingerprint of the node's key, `SHA256:...` as OpenSSH prints it.
    """

    def __init__(
        self,
        message: str,
        *,
        node: str,
        fingerprint: str,
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, node=node, where=where, hint=hint)
        self.fingerprint = fingerprint


class TransferError(TransportError):
    """Bytes did not arrive whole: short stream, digest mismatch, path that leaves its folder."""


class NodeError(TransportError):
    """The node answered, but cannot run its part: no usable Python, full disk, missing script."""


class NodeFailures(TransportError):
    """Several nodes failed; each has its own error.

    Attributes:
        failures: node name -> error, in the order of the spec.
    """

    def __init__(self, failures: Mapping[str, DtctlError]) -> None:
        names = list(failures)
        super().__init__(f"{len(names)} nodes failed", node=names[0], where=", ".join(names))
        self.failures = dict(failures)

    @property
    def summary(self) -> str:
        """Return one line with the error of the first node."""
        node, failure = next(iter(self.failures.items()))
        return f"{self.message}: {node}: {failure.message}"

    @property
    def nodes_by_reason(self) -> dict[tuple[str, str | None], list[str]]:
        """Return for each pair of message and hint the nodes that have it, in the order of the spec."""
        alike: dict[tuple[str, str | None], list[str]] = {}
        for node, failure in self.failures.items():
            alike.setdefault((failure.message, failure.hint), []).append(node)
        return alike


class LaunchError(DtctlError):
    """The job could not be started, or the requested run does not exist."""

    exit_code = 7


class SandboxError(LaunchError):
    """The sandbox's virtual hosts cannot be made, found or changed."""


class WorkerFailed(DtctlError):
    """The job started and then a worker failed."""

    exit_code = 8


class DoctorFailed(DtctlError):
    """At least one check found a failure, or the linter found a problem."""

    exit_code = 9


class SnapshotError(DtctlError):
    """A snapshot is missing, damaged or does not fit the run."""

    exit_code = 10


class Interrupted(DtctlError):
    """The command was stopped by a signal.

    Attributes:
        signal: number of the signal; the exit code is 128 + signal, as in a shell.
    """

    def __init__(self, message: str, *, signal: int, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, where=where, hint=hint)
        self.signal = signal


def suggest_name(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the hint for a name that does not exist: a known name with similar spelling, or else `otherwise`."""
    import difflib  # most commands need no hint

    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {matches[0]}?" if matches else otherwise


def suggest_node(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the hint for a node that does not exist; a node that differs only in its number is not suggested."""
    import re

    word = re.sub(r"\d+", "0", name)
    return suggest_name(name, (each for each in known if re.sub(r"\d+", "0", each) != word), otherwise)
