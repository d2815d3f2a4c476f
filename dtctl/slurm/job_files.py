"""Copies of a job's files in its run's folder, which grow with the files, and the offset up to which each was read.

The offsets are saved in slurm.json with the sizes of the copies, so that a later follower continues where the last one
stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

from dtctl import folders, names
from dtctl.launch.records.record import RUN_BYTES
from dtctl.launch.records.run_writer import write_private
from dtctl.slurm import batchlog
from dtctl.slurm.job_control import CONTROL_FOLDER
from dtctl.slurm.job_output import JOB_LOG
from dtctl.slurm.record_sync import WHOLE

STATE_FILE: Final = "slurm.json"
CONTROL_WHOLE: Final = frozenset(f"{CONTROL_FOLDER}/{name}" for name in WHOLE)

Part: TypeAlias = tuple[int, bytes]
"""Offset in a file, and the bytes from that offset on."""


class JobFiles:
    """Copies of one job's files, with the offsets up to which the files were read."""

    def __init__(self, folder: Path) -> None:
        """Continue where the last follower has stopped; `folder` is the run's folder."""
        self.folder = folder
        self.offsets = drop_unnoted(folder)
        """File of the job -> number of its bytes that were read; for a file that is replaced as a whole, its
        version."""

    @property
    def job_log(self) -> Path:
        """Path of the copy of the batch file's output."""
        return self.folder / JOB_LOG

    def read_log(self) -> str:
        """Return the text of the job log's copy."""
        return _text_of(self.job_log)

    def receive(self, files: Mapping[str, Part], *, is_over: bool) -> dict[str, Part]:
        """Advance the offsets and return the new parts, without an incomplete last line unless the job is over."""
        arrived: dict[str, Part] = {}
        for name, (offset, data) in files.items():
            if name in CONTROL_WHOLE:
                arrived[name], self.offsets[name] = (offset, data), offset
                continue
            complete = data if is_over else data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
            arrived[name] = offset, complete
            self.offsets[name] = offset + len(complete)
        return arrived

    def copy_events(self, arrived: dict[str, Part]) -> list[tuple[float, batchlog.Event]]:
        """Remove the new part of the job's log from `arrived`, copy it, and return its events in order."""
        _, data = arrived.pop(JOB_LOG, (0, b""))
        self.append(JOB_LOG, data)
        return _events_of(data.decode(errors="replace"))

    def copied_events(self) -> list[tuple[float, batchlog.Event]]:
        """Return the events in the copy, which earlier followers have emitted."""
        return _events_of(self.read_log())

    def append(self, name: str, data: bytes) -> None:
        """Append data to a copy."""
        path = self.folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(data)

    def save(self) -> None:
        """Save the offsets and sizes for the next follower.

        Raises:
            LaunchError: slurm.json cannot be written.
        """
        position = {"have": self.offsets, "copies": _read_copy_sizes(self.folder)}
        write_private(self.folder / STATE_FILE, json.dumps(position, indent=1) + "\n")


def drop_unnoted(folder: Path) -> dict[str, int]:
    """Truncate each copy to the size that the last follower saved, so that the rest is copied again once.

    Call this before the event that reports the new follower: later, a reader would see the copies shrink, and read
    lines twice.

    Args:
        folder: folder of the run on this machine.

    Returns:
        File of the job -> size of its copy in bytes.
    """
    try:
        position = json.loads(folders.read_regular(str(folder / STATE_FILE), RUN_BYTES))
    except (OSError, ValueError, RecursionError):
        position = {"have": {}, "copies": {}}
    for name in _read_copy_sizes(folder):
        os.truncate(folder / name, position["copies"].get(name, 0))
    return dict(position["have"])


def _read_copy_sizes(folder: Path) -> dict[str, int]:
    """Return the size of each copy of a job's files."""
    paths = list((folder / names.LOGS_DIR).glob("*/*.log"))
    paths += [folder / name for name in (JOB_LOG, names.METRICS_FILE)]
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths if path.exists()}


def _events_of(text: str) -> list[tuple[float, batchlog.Event]]:
    return batchlog.read_events(text.splitlines(), now=round(time.time(), 3))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
