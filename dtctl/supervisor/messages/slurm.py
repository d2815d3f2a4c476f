"""Message to the machine that has Slurm's commands. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import value
from dtctl.supervisor.messages.base import COUNT, Message


class AskSlurm(Message):
    """Answer a request; its JSON follows in frames of bytes, and so does the answer (dtctl/slurm/answers.py)."""

    op = "slurm"
    bytes: int = value(COUNT)
    """Bytes of the request."""
