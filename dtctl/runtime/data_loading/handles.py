"""Open files and connections of a data set in forked processes that read it.

Forked processes share the position in an open file: a read in one of them moves it for all. So each process reopens
every regular file that it has inherited, at its present position. Handles that cannot be reopened are sockets, and
databases whose library keeps locks of its process. If the data set has one before anything is read, it is refused
before training. If it has opened one since, for example with a first sample, each process restores the earlier value of
the attribute.
"""

from __future__ import annotations

import multiprocessing
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dtctl.errors import PlanError, WorkerFailed
from dtctl.runtime.members import walk_members

DESCRIPTORS: Final = Path("/proc/self/fd")
OUTPUT: Final = (1, 2)
"""Descriptors of standard output and standard error."""
KEPT: Final = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC | os.O_DSYNC | getattr(os, "O_DIRECT", 0)
"""Flags of an open file that are relevant after it was opened."""
DATABASES: Final = {"SQLite": (0, b"SQLite format 3\0"), "LMDB": (16, b"\xde\xc0\xef\xbe")}
"""Signatures of databases: offset in a file, and bytes at this offset."""


@dataclass(slots=True)
class DatasetHandles:
    """Open files and connections of a data set before anything is read from it."""

    data: object
    before: list[tuple[object, dict[str, Any]]] = field(default_factory=list)
    """Objects of the data set, with the values of their attributes."""

    def __post_init__(self) -> None:
        """Refuse handles that several processes cannot share.

        Raises:
            PlanError: the data set holds a socket, or an open database.
        """
        if multiprocessing.get_start_method() != "fork":
            return
        for name, value in walk_members(self.data):
            kind = _describe_connection(value)
            if kind is not None:
                raise PlanError(
                    f"the data set holds {kind} ({name}), which processes that are forked to read cannot share",
                    where="train.data_workers",
                    hint="open it when the first sample is read, in `__getitem__`, or use `data_workers: 0`",
                )
            if hasattr(value, "__dict__"):
                self.before.append((value, dict(vars(value))))

    def list_new_handles(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return handles opened since that cannot be shared.

        Each entry has the attribute dictionary of the owner, the attribute's name, and the earlier value.
        """
        return [
            (vars(owner), name, before.get(name, _MISSING))
            for owner, before in self.before
            for name, value in vars(owner).items()
            if value is not before.get(name) and _describe_connection(value) is not None
        ]


_MISSING: Final = object()


def put_back(opened: list[tuple[dict[str, Any], str, Any]]) -> None:
    """Restore attributes in a process that has inherited connections of another one."""
    for attributes, name, before in opened:
        if before is _MISSING:
            del attributes[name]
        else:
            attributes[name] = before


def _describe_connection(value: object) -> str | None:
    """Return the kind of connection that an object is; None if it is none."""
    number = _read_descriptor(value)
    if number is not None:
        try:
            return "a socket" if stat.S_ISSOCK(os.fstat(number).st_mode) else None
        except OSError:  # the file is closed
            return None
    # Connections of libraries are objects without attributes that cannot be pickled. The open files show to which
    # database they belong.
    if hasattr(value, "__dict__") or type(value).__module__ in ("builtins", "_thread", "_io", "mmap"):
        return None
    try:
        value.__reduce_ex__(4)
    except TypeError:
        return _open_database()
    except Exception:  # noqa: BLE001  # an object's own code
        return None
    return None


def _read_descriptor(value: object) -> int | None:
    try:
        number = value.fileno()  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  # it has none, is closed, or is no file
        return None
    return number if isinstance(number, int) and number >= 0 else None


def _open_database() -> str | None:
    for number in _regular_files():
        try:
            head = os.pread(number, 64, 0)  # opening and closing the file would release its locks
        except OSError:
            continue
        for kind, (offset, mark) in DATABASES.items():
            if head[offset : offset + len(mark)] == mark:
                return f"an open {kind} database, {(DESCRIPTORS / str(number)).readlink()}"
    return None


def _regular_files() -> list[int]:
    if not DESCRIPTORS.is_dir():
        return []
    found = []
    for name in (entry.name for entry in DESCRIPTORS.iterdir()):
        try:
            if stat.S_ISREG(os.fstat(int(name)).st_mode):
                found.append(int(name))
        except OSError:  # the descriptor of the listed folder
            continue
    return found


@dataclass(frozen=True, slots=True)
class OpenFile:
    """Regular file that a process has open."""

    flags: int
    position: int
    identity: tuple[int, int]
    """Device and inode of the file."""


def open_files() -> dict[int, OpenFile]:
    """Return the regular files that are open for reading, by their descriptors.

    Files that are open for output stay shared: each process appends to the output of the others.
    """
    if multiprocessing.get_start_method() != "fork":
        return {}
    found = {}
    for number in _regular_files():
        flags = None if number in OUTPUT else _read_open_flags(number)
        if flags is not None and flags & os.O_ACCMODE != os.O_WRONLY and not flags & getattr(os, "O_PATH", 0):
            info = os.fstat(number)
            found[number] = OpenFile(flags, os.lseek(number, 0, os.SEEK_CUR), (info.st_dev, info.st_ino))
    return found


def _read_open_flags(number: int) -> int | None:
    try:
        text = Path(f"/proc/self/fdinfo/{number}").read_text()
    except OSError:
        return None
    return next((int(line.split()[1], 8) for line in text.splitlines() if line.startswith("flags:")), None)


def reopen_inherited_files(files: dict[int, OpenFile]) -> None:
    """Reopen inherited files under the same descriptors and at the same positions.

    Args:
        files: result of `open_files` in the parent process.

    Raises:
        WorkerFailed: a file cannot be opened.
    """
    for number, file in files.items():
        if not _is_same_open_file(number, file):
            continue
        path = DESCRIPTORS / str(number)
        try:
            new = os.open(path, file.flags & KEPT)
            os.lseek(new, file.position, os.SEEK_SET)
            os.dup2(new, number, inheritable=os.get_inheritable(number))
            os.close(new)
        except OSError as exc:
            raise WorkerFailed(
                f"a process that reads data cannot open {path.readlink()} again: {exc.strerror}",
                where="train.data_workers",
                hint="all processes would share one position in the file; open it in `__getitem__`, or use "
                "`data_workers: 0`",
            ) from exc


def _is_same_open_file(number: int, file: OpenFile) -> bool:
    """Return whether a descriptor still refers to a file, since libraries close theirs in forked processes."""
    try:
        info = os.fstat(number)
    except OSError:
        return False
    return (info.st_dev, info.st_ino) == file.identity
