"""Reference to a job of Slurm, by which later commands find the job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRef:
    """A job and the location of its files."""

    job: str
    folder: str
    """Folder of the job's files on the machine with Slurm's commands."""
    python: str
    """Python interpreter on that machine."""
    workers_apart: bool
    """True if each worker is a task of its own (kind direct); if not, torchrun prefixes the workers' lines."""
    slots: int
    max_attempts: int
