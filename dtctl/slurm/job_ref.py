"""Reference by which a job of Slurm is found again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRef:
    """A job and where it keeps its files."""

    job: str
    folder: str
    """Folder on the machine that runs Slurm's commands."""
    python: str
    """Interpreter there."""
    workers_apart: bool
    """True if each worker is a task of its own (kind direct); if not, torchrun marks their lines."""
    slots: int
    max_attempts: int
