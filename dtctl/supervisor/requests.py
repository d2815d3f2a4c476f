"""The requests that the program on nodes answers, by the class that answers them. Stdlib only, Python 3.8.

A class is imported at the first of its requests, and its module is sent only to nodes that get such a request
(bootstrap.py).
"""

from __future__ import annotations

from dtctl.schema import InvalidMessage

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import ClassVar

    from dtctl.supervisor.frames import FdLink
    from dtctl.supervisor.messages.base import Message

ANSWERED_BY = {
    "setup.SetupRequests": ("hello", "push", "prepare", "probe", "start", "stand-by", "attach", "sweep"),
    "outputs.OutputRequests": ("list", "digest", "send"),
    "shared.SharedRequests": (
        "list-shared", "offer-shared", "send-shared", "take-shared", "keep-shared", "set-aside",
        "remove-shared",
    ),
    "clean.StoredRequests": ("stored", "remove"),
    "node_runs.RunRequests": ("runs", "logs"),
    "slurm_commands.SlurmRequests": ("slurm",),
    "probe.main.ProbeRequests": (
        "time", "facts", "job-python", "listen", "spread", "call", "measure", "network-settings", "mark", "look",
        "unmark", "start-python", "round",
    ),
}  # fmt: skip
"""The `op` of each request, by the class in this package that answers it."""


class RequestFailed(Exception):
    """This node cannot carry out a request; `code` is for the control machine, the text for the user."""

    def __init__(self, code: str, text: str) -> None:
        """Store the code and the text of the failure."""
        super().__init__(text)
        self.code = code


class NodeRequests:
    """Answers to the requests of one family, over one link."""

    KINDS: ClassVar[Mapping[str, type[Message]]]
    IDLE_LIMIT_S: ClassVar[float]
    """Seconds for which the control machine may be silent."""

    def __init__(self, link: FdLink, workdir: str) -> None:
        """Answer over a link; `workdir` is the node's folder, which need not exist."""
        self.link = link
        self.workdir = workdir

    def answer(self, request: Message) -> int | None:
        """Answer one request; return the exit status of the remote command if it was the last one."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove the files of the answers, and end the processes that they have started."""


def find_module(op: object) -> tuple[str, str]:
    """Return the module and the class that answer a request.

    Raises:
        InvalidMessage: there is no such request.
    """
    for name, ops in ANSWERED_BY.items():
        if op in ops:
            module, _, kind = name.rpartition(".")
            return f"dtctl.supervisor.{module}", kind
    raise InvalidMessage("no message that is valid here")
