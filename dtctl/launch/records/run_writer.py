"""Writer of a run's folder for its launcher; record.py describes and reads the folder.

Folders have mode 0700 and files 0600, since environments and logs are private.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dtctl import folders, names
from dtctl.errors import LaunchError
from dtctl.launch.records.record import RUN_FILE, RunInfo, RunRecord, check_no_link, translate_write_errors

if TYPE_CHECKING:
    from dtctl.launch.records.events import Event
    from dtctl.plan.model import Plan

ROOM_FILE, ROOM_BYTES, ROOM_STEP_BYTES = "room", 512 << 10, 64 << 10
"""Name, size in bytes and step in bytes of a file that reserves space on the disk before the start; when the disk is
full, the space is freed for events and records."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
LOCK_WAIT_S = 0.5
"""Seconds that a new launcher waits for processes that check whether there is a launcher."""


def prepare_state_folder(base_dir: Path, name: str) -> Path:
    """Return a folder of dtctl's files next to the spec, which only this user can read and git ignores.

    Raises:
        LaunchError: the folder cannot be made, is a link, or others own it or may write to it.
    """
    state = base_dir / names.STATE_DIR
    folder = state / name
    check_no_link(base_dir, name)
    try:
        with translate_write_errors(folder):
            folders.make_durable(str(state), 0o700)
            folders.check_private(str(state))
            folders.make_durable(str(folder), 0o700)
            folders.check_private(str(folder))
    except LaunchError as exc:
        if not isinstance(exc.__cause__, folders.NotPrivateError):
            raise
        foreign = exc.__cause__
        raise LaunchError(
            f"others could change the run's records: {foreign.strerror}", where=foreign.filename, hint=foreign.fix
        ) from None
    ignore = state / ".gitignore"
    if not ignore.exists():
        write_private(ignore, "*\n")
    return folder


def write_private(path: Path, text: str) -> None:
    """Replace the file at `path` in one step, mode 0600.

    Raises:
        LaunchError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with translate_write_errors(path):
        try:
            partial.unlink(missing_ok=True)  # A killed process with the same id may have left this file.
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            folders.sync_folder_entries(str(path.parent))
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


class RunWriter(RunRecord):
    """The folder of one run for its launcher, the only process that writes to it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._events: int | None = None
        self._torn = False
        self._room: int | None = None
        self.lost_events = 0
        """Number of events that could not be written."""

    @classmethod
    def create(cls, base_dir: Path, info: RunInfo) -> RunWriter:
        """Make the folder of a new run below `base_dir`.

        Raises:
            LaunchError: a run with this name exists, or the folder cannot be written to.
        """
        folder = prepare_state_folder(base_dir, names.RUNS_DIR) / info.run
        try:
            with translate_write_errors(folder):
                folder.mkdir(mode=0o700)
                folders.sync_folder_entries(str(folder.parent))
        except LaunchError as exc:
            if not isinstance(exc.__cause__, FileExistsError):
                raise
            raise LaunchError(
                f"a run named {info.run} already exists",
                where=str(folder),
                hint="choose another `--name`, or leave it out and dtctl chooses one",
            ) from None
        with translate_write_errors(folder):
            (folder / names.LOGS_DIR).mkdir(mode=0o700)
        record = cls(folder)
        with translate_write_errors(folder):
            record.reserve_disk_space()
        record.write_info(info)
        return record

    @contextmanager
    def launcher_lock(self) -> Iterator[None]:
        """Hold the lock of the run's only launcher while the context lasts.

        Raises:
            LaunchError: another launcher holds the lock.
        """
        # A process that only checks for a launcher holds a shared lock briefly, which must not stop a new launcher.
        deadline = time.monotonic() + LOCK_WAIT_S
        while (lock_fd := self._acquire_launcher_lock(fcntl.LOCK_EX)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if lock_fd is None:
            raise LaunchError(f"run {self.run} already has a launcher", where=str(self.folder))
        try:
            yield
        finally:
            os.close(lock_fd)

    def write_info(self, info: RunInfo) -> None:
        """Record the launcher of the run."""
        self.write(RUN_FILE, json.dumps(asdict(info), indent=1) + "\n")

    def write_spec(self, text: str) -> None:
        """Record the spec, so that the run's nodes can be found after a change of the file."""
        self.write(names.RUN_SPEC_FILE, text)

    def write_plan(self, plan: Plan, hosts: Mapping[str, str] | None = None) -> None:
        """Record the plan of the attempt that is about to start, and the known host names of its nodes."""
        facts = asdict(plan)
        for node in facts["nodes"]:
            if host := (hosts or {}).get(node["name"]):
                node["host"] = host
        self.write(names.PLAN_FILE, json.dumps(facts, indent=1) + "\n")

    def append_event(self, event: Event) -> None:
        """Append one event, as a whole line for concurrent readers; on a full disk, the event is lost."""
        line = (json.dumps(event.to_json(), separators=(",", ":")) + "\n").encode()
        if self._torn:
            line = b"\n" + line
        rest = line[self._append_event_bytes(line) :]
        while rest and self.make_room():
            rest = rest[self._append_event_bytes(rest) :]
        self._torn = 0 < len(rest) < len(line) or (self._torn and bool(rest))
        self.lost_events += bool(rest)

    def _append_event_bytes(self, data: bytes) -> int:
        """Append the bytes that fit on the disk to the events; return their number."""
        try:
            if self._events is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                self._events = os.open(self.folder / names.EVENTS_FILE, flags, 0o600)
            return os.write(self._events, data)
        except OSError:
            return 0

    def write(self, name: str, text: str) -> None:
        """Replace a file of the record.

        Raises:
            LaunchError: the file cannot be written, even with the reserved space.
        """
        self.retry_with_reserve(lambda: write_private(self.folder / name, text))

    def retry_with_reserve(self, action: Callable[[], None]) -> None:
        """Call a function that writes a record; free reserved space and repeat the call while the disk is full.

        Raises:
            LaunchError: the record cannot be written, even with the reserved space.
        """
        while True:
            try:
                return action()
            except LaunchError as exc:
                if getattr(exc.__cause__, "errno", None) not in NO_ROOM or not self.make_room():
                    raise

    def reserve_disk_space(self) -> None:
        """Reserve space on the disk for records that are needed even when the disk is full later.

        Raises:
            OSError: the disk has no space.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._room = os.open(self.folder / ROOM_FILE, flags, 0o600)
        with contextlib.suppress(FileNotFoundError):
            (self.folder / ROOM_FILE).unlink()  # The kernel frees the space when this process ends.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._room, 0, ROOM_BYTES)
        else:
            os.pwrite(self._room, bytes(ROOM_BYTES), 0)

    def make_room(self) -> bool:
        """Free a part of the reserved space; return False if none is left."""
        size = os.fstat(self._room).st_size if self._room is not None else 0
        if self._room is None or not size:
            return False
        os.ftruncate(self._room, max(0, size - ROOM_STEP_BYTES))
        return True

    def open_output(self, name: str) -> int:
        """Open a file of the run for the output of a process: create or append to it, and follow no link.

        Returns:
            A descriptor for reading and writing.

        Raises:
            LaunchError: The file cannot be opened.
        """
        path = self.folder / name
        with translate_write_errors(path):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
