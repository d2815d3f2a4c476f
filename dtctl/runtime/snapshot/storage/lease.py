"""Lease of a folder of snapshots: one run writes there at a time, and a lease is stale when its holder is gone.

A writer puts a file of its own into the folder, lists the files of other writers, and waits until the first writer is
determined. If two come at the same time, each finds the other's file, and the one with the larger token withdraws. That
needs no lock of the file system and no clock that machines share, so it works on network file systems and in object
stores alike, as long as a listing contains every file that was written before.

A holder renews its lease while it runs. If it is a process of this machine, the kernel shows whether it still runs. A
holder on another machine is gone when its lease was not renewed for `STALE_S` by this machine's clock. A later attempt
of the same run takes over at once, and so does a worker that replaces a lost one: the launcher has ended the former
holder. A process that has lost its lease detects it before it commits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final

from dtctl import names, node_facts
from dtctl.errors import DtctlError, SnapshotError
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.storage import durable
from dtctl.runtime.snapshot.storage.place import Place, Remote

RENEW_S: Final = 5.0
STALE_S: Final = 30.0
RENEW_REMOTE_S: Final = 20.0
STALE_REMOTE_S: Final = 90.0
"""Seconds in object stores, where each renewal is an upload."""
POLL_S: Final = 0.2
MAX_BYTES: Final = 4096
_NAME = re.compile(r"\.lease-([0-9a-f]{16})\.json\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Holder of a lease."""

    run: str
    """Empty outside of dtctl's launcher."""
    attempt: int
    host: str
    boot: str
    """Boot id of the machine; a new one after each boot."""
    space: str
    """Process number space (a container has its own); the number of a process is valid only inside of it."""
    pid: int
    started: str
    """Time when the process was, by its kernel; numbers are used again."""
    held: bool = False
    """True once no other writer was found; False while the first writer is being determined."""
    epoch: int = 0
    """Epoch of the process group that it was started for, if it replaces a lost worker."""
    count: int = 0
    """Number of renewals in object stores; on a disk the file's time changes."""

    @property
    def is_here(self) -> bool:
        """Return whether it is a process of this machine, whose kernel can be queried."""
        return (self.boot, self.space) == _here()

    def is_gone(self) -> bool | None:
        """Return whether its process has ended; None if this machine cannot determine it."""
        return _started(self.pid) != self.started if self.is_here else None

    def describe(self) -> str:
        """Return the holder in words."""
        who = f"run {self.run}" if self.run else "a training"
        return f"{who} (process {self.pid} on {self.host})"


def myself() -> Holder:
    """This process."""
    boot, space = _here()
    attempt, epoch = (os.environ.get(name, "") for name in (names.ATTEMPT, names.LIVE_EPOCH))
    return Holder(
        run=os.environ.get(names.RUN_ID, ""),
        attempt=int(attempt) if attempt.isdecimal() else 0,
        epoch=int(epoch) if epoch.isdecimal() else 0,
        host=socket.gethostname(),
        boot=boot,
        space=space,
        pid=os.getpid(),
        started=_started(os.getpid()),
    )


def _here() -> tuple[str, str]:
    try:
        return node_facts.boot_id(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname(), ""


def _started(pid: int) -> str:
    """Return when a process was started; empty if there is none, or only what is left of one."""
    ticks = node_facts.start_ticks(pid)
    return str(ticks) if ticks > 0 else ""


class Lease:
    """The right to write into a folder; used by one process at a time."""

    def __init__(self, folder: Place) -> None:
        """Nothing is written yet."""
        self._folder, self._token = folder, secrets.token_hex(8)
        self._remote = isinstance(folder, Remote)
        self._path = folder / f".lease-{self._token}.json"
        self._holder = myself()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Become the only writer of the folder, until `release`.

        Raises:
            SnapshotError: another writer holds it, or the folder cannot be written.
        """
        try:
            durable.make_folder(self._folder)
            self._write()
        except OSError as exc:
            raise SnapshotError(
                f"snapshots cannot be written here: {exc.strerror or exc}",
                where=str(self._folder),
                hint="set `train.snapshot.dir` to a folder that this worker can write",
            ) from exc
        try:
            self._wait_for_others()
            self._holder = replace(self._holder, held=True)
            self._write()
        except BaseException:
            self._remove()
            raise
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Check that the lease is still held; write it again if it was removed and there is no other writer.

        Raises:
            SnapshotError: another writer has taken it.
        """
        if self._thread is None or self._path.exists():
            return
        others = self._others() if self._folder.exists() else {}
        if others:
            raise SnapshotError(
                f"{', '.join(holder.describe() for holder in others.values())} has taken over this folder of snapshots",
                where=str(self._folder),
                hint="this run was silent for too long, or is an earlier attempt of one that goes on elsewhere",
            )
        durable.make_folder(self._folder)
        self._write()

    def release(self) -> None:
        """Let others write."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._remove()

    # -- others -----------------------------------------------------------------------------------------------------

    def _wait_for_others(self) -> None:
        stale_s = STALE_REMOTE_S if self._remote else STALE_S
        last_beats: dict[str, tuple[object, float]] = {}
        while True:
            others = self._others()
            for token, holder in list(others.items()):
                if self._may_be_removed(holder):
                    self._forget(token)
                    del others[token]
            if not others:
                return
            now_s = time.monotonic()
            for token, holder in others.items():
                mark = (holder, self._touched(token))
                if token not in last_beats or last_beats[token][0] != mark:
                    if token in last_beats and holder.held:
                        self._refuse(holder)  # it has just been renewed
                    last_beats[token] = (mark, now_s)
                elif now_s - last_beats[token][1] > stale_s:
                    self._forget(token)
                if holder.held and holder.is_gone() is False:
                    self._refuse(holder)
                if not holder.held and token < self._token and holder.is_gone() is not True:
                    self._refuse(holder)  # it was here at the same time; one of two has to go
            time.sleep(POLL_S * (5 if self._remote else 1))

    def _may_be_removed(self, holder: Holder) -> bool:
        mine = self._holder
        if holder.is_here and (holder.pid, holder.started) == (mine.pid, mine.started):
            return True  # an earlier training of this process
        if holder.run and holder.run == mine.run and (holder.attempt, holder.epoch) < (mine.attempt, mine.epoch):
            return True
        return holder.is_gone() is True

    def _refuse(self, holder: Holder) -> None:
        raise SnapshotError(
            f"{holder.describe()} writes its snapshots here, and two runs would remove each other's",
            where=str(self._folder),
            hint="stop it (`dtctl stop`), or give this run another `train.snapshot.dir`",
        )

    def _others(self) -> dict[str, Holder]:
        leases = {}
        for path in self._folder.iterdir():
            match = _NAME.match(path.name)
            if match is None or match[1] == self._token:
                continue
            try:
                with path.open("rb", buffering=0) as file:  # opened, so that what is read is no old copy
                    held = json.loads(file.read(MAX_BYTES))
                leases[match[1]] = Holder(
                    **{field.name: held[field.name] for field in fields(Holder) if field.name in held}
                )
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError):
                self._forget(match[1])  # cut short by a machine that lost its power
        return leases

    def _touched(self, token: str) -> object:
        path = self._folder / f".lease-{token}.json"
        if isinstance(path, Remote):
            return None  # its content has a count
        try:
            return path.stat().st_mtime_ns
        except OSError:
            return None

    def _forget(self, token: str) -> None:
        with contextlib.suppress(OSError, DtctlError):
            (self._folder / f".lease-{token}.json").unlink(missing_ok=True)

    # -- one's own --------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        text = json.dumps(asdict(self._holder)).encode()
        if isinstance(self._path, Remote):
            with self._path.upload() as out:
                out.write(text)
            return
        # Not synced: after a loss of power the process is gone, too.
        draft = self._path.with_suffix(layout.DRAFT_SUFFIX)
        draft.write_bytes(text)
        draft.replace(self._path)

    def _renew(self) -> None:
        every_s = RENEW_REMOTE_S if self._remote else RENEW_S
        while not self._ended.wait(every_s):
            try:
                if isinstance(self._path, Path):
                    os.utime(self._path)  # needs no room, on a disk that is full
                elif self._path.exists():
                    self._holder = replace(self._holder, count=self._holder.count + 1)
                    self._write()
            except (OSError, DtctlError):
                continue  # a link that is down, or it was taken: the commit will detect it

    def _remove(self) -> None:
        with contextlib.suppress(OSError, DtctlError):
            self._path.unlink(missing_ok=True)
