"""Copies of a job's files in its run's folder, made as the files grow, and how much of each was read.

That is saved in slurm.json together with the sizes of the copies, so that a later follower continues where the last one
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
from dtctl.slurm.mirror import WHOLE

STATE_FILE: Final = "slurm.json"
CONTROL_WHOLE: Final = frozenset(f"{CONTROL_FOLDER}/{name}" for name in WHOLE)

Part: TypeAlias = tuple[int, bytes]
"""An offset in a file, and what stands there."""


class JobFiles:
    """The files of one job, as far as they were read."""

    def __init__(self, folder: Path) -> None:
        """Go on where the last follower has stopped; `folder` is the run's."""
        self.folder = folder
        self.offsets = drop_unnoted(folder)
        """File of the job -> bytes of it that were read; of one that is replaced, its version."""

    @property
    def job_log(self) -> Path:
        """The copy of what the batch file prints."""
        return self.folder / JOB_LOG

    def read_log(self) -> str:
        """Return what that has so far."""
        return _text_of(self.job_log)

    def receive(self, files: Mapping[str, Part], *, is_over: bool) -> dict[str, Part]:
        """Note how far files were read; a line that may grow is read again, unless the job is over."""
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
        """Take what has arrived of the job's log out, copy it, and return its events in their order."""
        _, data = arrived.pop(JOB_LOG, (0, b""))
        self.append(JOB_LOG, data)
        return _events_of(data.decode(errors="replace"))

    def copied_events(self) -> list[tuple[float, batchlog.Event]]:
        """Return the events of the copy: those that earlier followers have emitted."""
        return _events_of(self.read_log())

    def append(self, name: str, data: bytes) -> None:
        """Let a copy grow."""
        path = self.folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(data)

    def save(self) -> None:
        """Note for the next follower how far this one has come.

        Raises:
            LaunchError: it cannot be written.
        """
        position = {"have": self.offsets, "copies": _copies(self.folder)}
        write_private(self.folder / STATE_FILE, json.dumps(position, indent=1) + "\n")


def drop_unnoted(folder: Path) -> dict[str, int]:
    """Cut off what a follower had copied and not noted when it died, so that it is copied again, once.

    Call it before the event that the job is followed again: a later reader would see the copies shrink, and the same
    lines twice.

    Args:
        folder: of the run, here.

    Returns:
        File of the job -> bytes of it that are here.
    """
    try:
        position = json.loads(folders.read_regular(str(folder / STATE_FILE), RUN_BYTES))
    except (OSError, ValueError, RecursionError):
        position = {"have": {}, "copies": {}}
    for name in _copies(folder):
        os.truncate(folder / name, position["copies"].get(name, 0))
    return dict(position["have"])


def _copies(folder: Path) -> dict[str, int]:
    """Size of each copy of a job's files."""
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
