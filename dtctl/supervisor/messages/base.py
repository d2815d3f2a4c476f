"""Base of all messages, and those that every family has. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import InvalidMessage, Record, integer, prose, text, value

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar, Self

WORKERS = 4096
"""Most workers of one node."""
TEXT = text(1 << 20)
"""Characters of a text that fits into a frame."""
NAME = text(4096)
RANK = integer(-1, 1 << 24)
"""-1: torchrun's agent."""
WORKER_RANK = integer(0, 1 << 24)
COUNT = integer(0)
PORT = integer(0, 65_535)
EXIT_CODE = integer(0, 255)
PROCESSES = integer(0, 1 << 22)


class Message(Record):
    """A record that names its type: its JSON has the key `op`, too."""

    op: ClassVar[str]

    def __new__(cls, **_: object) -> Self:
        """Put the operation before the values, so that it comes first."""
        message = super().__new__(cls)
        message.__dict__["op"] = cls.op
        return message


class Quit(Message):
    """End: there are no more requests for this node."""

    op = "quit"


class Refusal(Message):
    """The node cannot do its part."""

    op = "error"
    code: str = value(text(40))
    """Code by which the control machine chooses its hint."""
    message: str = value(prose)


class Working(Message):
    """The node is at work on what it was asked last."""

    op = "working"


def by_op(*kinds: type[Message]) -> dict[str, type[Message]]:
    """Return the kinds of message, by their `op`."""
    return {kind.op: kind for kind in kinds}


def parse(document: Mapping[str, Any], kinds: Mapping[str, type[Message]]) -> Message:
    """Return the message that a JSON object is.

    Raises:
        InvalidMessage: it is none of these kinds, or has not its form.
    """
    op = document.get("op")
    kind = kinds.get(op) if isinstance(op, str) else None
    if kind is None:
        raise InvalidMessage("no message that is valid here")
    return kind.parse(document)
