"""Message to the machine with Slurm's commands. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import define_record_key
from dtctl.supervisor.messages.base import COUNT, Message


class SlurmRequest(Message):
    """Request whose JSON follows in frames of bytes, as does the JSON of the answer (dtctl/slurm/answers.py)."""

    op = "slurm"
    bytes: int = define_record_key(COUNT)
    """Size of the request's JSON in bytes."""
