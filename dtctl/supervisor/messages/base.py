"""Base of all messages, and the messages common to all families. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import InvalidMessage, Record, check_prose, define_record_key, make_integer_check, make_text_check

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar, Self

WORKERS = 4096
"""Most workers of one node."""
TEXT = make_text_check(1 << 20)
"""Check of a text that fits into a frame."""
NAME = make_text_check(4096)
RANK = make_integer_check(-1, 1 << 24)
"""Check of a global rank; -1 for torchrun's agent."""
WORKER_RANK = make_integer_check(0, 1 << 24)
COUNT = make_integer_check(0)
PORT = make_integer_check(0, 65_535)
EXIT_CODE = make_integer_check(0, 255)
PROCESSES = make_integer_check(0, 1 << 22)


class Message(Record):
    """Record whose JSON also has the key `op` with its type."""

    op: ClassVar[str]

    def __new__(cls, **_: object) -> Self:
        """Put `op` before the values, so that it comes first."""
        message = super().__new__(cls)
        message.__dict__["op"] = cls.op
        return message


class Quit(Message):
    """Request to exit: there are no more requests for this node."""

    op = "quit"


class Refusal(Message):
    """Answer: the node cannot carry out a request."""

    op = "error"
    code: str = define_record_key(make_text_check(40))
    """Code by which the control machine chooses its hint."""
    message: str = define_record_key(check_prose)


class StillWorking(Message):
    """Report: the node still works on the last request."""

    op = "working"


def index_message_types(*kinds: type[Message]) -> dict[str, type[Message]]:
    """Return types of messages by their `op`."""
    return {kind.op: kind for kind in kinds}


def parse_message_document(document: Mapping[str, Any], kinds: Mapping[str, type[Message]]) -> Message:
    """Return the message in a JSON object.

    Raises:
        InvalidMessage: the object is not a message of these types, or is malformed.
    """
    op = document.get("op")
    kind = kinds.get(op) if isinstance(op, str) else None
    if kind is None:
        raise InvalidMessage("no message that is valid here")
    return kind.parse(document)
