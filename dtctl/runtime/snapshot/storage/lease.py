"""Lease of a snapshot folder: one run writes there at a time, and a lease is stale when its holder has ended.

A writer puts a file of its own into the folder, lists the files of other writers, and waits until the first writer is
determined. If two come at the same time, each finds the other's file, and the one with the larger token withdraws. This
needs no lock of the file system and no common clock, so it works on network file systems and in object stores alike, as
long as a listing contains every file that was written before.

A holder renews its lease while it runs. If it is a process of this machine, the kernel shows whether it still runs. A
holder on another machine counts as ended if its lease was not renewed for `STALE_S` by this machine's clock. A later
attempt of the same run takes over at once, and so does a worker that replaces a lost one, since the launcher has ended
the former holder. A process that has lost its lease detects this before it commits.
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
from dtctl.runtime.snapshot.storage.place import Place, RemotePath

RENEW_S: Final = 5.0
STALE_S: Final = 30.0
RENEW_REMOTE_S: Final = 20.0
STALE_REMOTE_S: Final = 90.0
"""Limit for object stores, where each renewal is an upload."""
POLL_S: Final = 0.2
MAX_BYTES: Final = 4096
_NAME = re.compile(r"\.lease-([0-9a-f]{16})\.json\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """Holder of a lease."""

    run: str
    """Id of the run; empty outside of dtctl's launcher."""
    attempt: int
    host: str
    boot: str
    """Boot id of the machine, which changes with each boot."""
    space: str
    """Process number space (each container has its own), in which the process number is valid."""
    pid: int
    started: str
    """Start time of the process by its kernel, since process numbers are reused."""
    held: bool = False
    """True once no other writer was found; False while the first writer is being determined."""
    epoch: int = 0
    """Epoch of the process group for which the process was started, if it replaces a lost worker."""
    count: int = 0
    """Number of renewals in object stores; on a disk the file's time changes instead."""

    @property
    def is_local_process(self) -> bool:
        """Return whether the holder is a process of this machine, whose kernel can be queried."""
        return (self.boot, self.space) == _read_boot_and_namespace()

    def has_process_ended(self) -> bool | None:
        """Return whether the holder's process has ended; None if this machine cannot determine it."""
        return _read_process_start(self.pid) != self.started if self.is_local_process else None

    def describe(self) -> str:
        """Return a description of the holder."""
        who = f"run {self.run}" if self.run else "a training"
        return f"{who} (process {self.pid} on {self.host})"


def build_own_holder() -> LeaseHolder:
    """Describe this process as the holder of a lease."""
    boot, space = _read_boot_and_namespace()
    attempt, epoch = (os.environ.get(name, "") for name in (names.ATTEMPT, names.LIVE_EPOCH))
    return LeaseHolder(
        run=os.environ.get(names.RUN_ID, ""),
        attempt=int(attempt) if attempt.isdecimal() else 0,
        epoch=int(epoch) if epoch.isdecimal() else 0,
        host=socket.gethostname(),
        boot=boot,
        space=space,
        pid=os.getpid(),
        started=_read_process_start(os.getpid()),
    )


def _read_boot_and_namespace() -> tuple[str, str]:
    try:
        return node_facts.read_boot_id(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname(), ""


def _read_process_start(pid: int) -> str:
    """Return the start time of a process; empty if it does not exist or is a zombie."""
    ticks = node_facts.start_ticks(pid)
    return str(ticks) if ticks > 0 else ""


class Lease:
    """Right to write into a folder; used by one process at a time."""

    def __init__(self, folder: Place) -> None:
        """Prepare a lease of a folder, without writing to it; `acquire` does that."""
        self._folder, self._token = folder, secrets.token_hex(8)
        self._remote = isinstance(folder, RemotePath)
        self._path = folder / f".lease-{self._token}.json"
        self._holder = build_own_holder()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Become the only writer of the folder, until `release`.

        Raises:
            SnapshotError: another writer holds the lease, or the folder cannot be written.
        """
        try:
            durable.make_durable_folder(self._folder)
            self._write_own_lease()
        except OSError as exc:
            raise SnapshotError(
                f"snapshots cannot be written here: {exc.strerror or exc}",
                where=str(self._folder),
                hint="set `train.snapshot.dir` to a folder that this worker can write",
            ) from exc
        try:
            self._wait_for_others()
            self._holder = replace(self._holder, held=True)
            self._write_own_lease()
        except BaseException:
            self._remove_own_lease()
            raise
        self._thread = threading.Thread(target=self._renew_own_lease, name="lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Check that the lease is still held; write it again if it was removed and there is no other writer.

        Raises:
            SnapshotError: another writer has taken it.
        """
        if self._thread is None or self._path.exists():
            return
        others = self._read_other_leases() if self._folder.exists() else {}
        if others:
            raise SnapshotError(
                f"{', '.join(holder.describe() for holder in others.values())} has taken over this folder of snapshots",
                where=str(self._folder),
                hint="this run was silent for too long, or is an earlier attempt of a run that continues elsewhere",
            )
        durable.make_durable_folder(self._folder)
        self._write_own_lease()

    def release(self) -> None:
        """Remove the lease, so that other processes can write into the folder."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._remove_own_lease()

    # -- other leases -----------------------------------------------------------------------------------------------

    def _wait_for_others(self) -> None:
        stale_s = STALE_REMOTE_S if self._remote else STALE_S
        last_beats: dict[str, tuple[object, float]] = {}
        while True:
            others = self._read_other_leases()
            for token, holder in list(others.items()):
                if self._may_be_removed(holder):
                    self._remove_lease_file(token)
                    del others[token]
            if not others:
                return
            now_s = time.monotonic()
            for token, holder in others.items():
                mark = (holder, self._read_renewal_time(token))
                if token not in last_beats or last_beats[token][0] != mark:
                    if token in last_beats and holder.held:
                        self._raise_folder_in_use(holder)  # the holder has just renewed it
                    last_beats[token] = (mark, now_s)
                elif now_s - last_beats[token][1] > stale_s:
                    self._remove_lease_file(token)
                if holder.held and holder.has_process_ended() is False:
                    self._raise_folder_in_use(holder)
                if not holder.held and token < self._token and holder.has_process_ended() is not True:
                    # both writers arrived at the same time, so the one with the larger token withdraws
                    self._raise_folder_in_use(holder)
            time.sleep(POLL_S * (5 if self._remote else 1))

    def _may_be_removed(self, holder: LeaseHolder) -> bool:
        mine = self._holder
        if holder.is_local_process and (holder.pid, holder.started) == (mine.pid, mine.started):
            return True  # an earlier run in this process held it
        if holder.run and holder.run == mine.run and (holder.attempt, holder.epoch) < (mine.attempt, mine.epoch):
            return True
        return holder.has_process_ended() is True

    def _raise_folder_in_use(self, holder: LeaseHolder) -> None:
        raise SnapshotError(
            f"{holder.describe()} writes its snapshots here, and two runs would remove each other's",
            where=str(self._folder),
            hint="stop it (`dtctl stop`), or give this run another `train.snapshot.dir`",
        )

    def _read_other_leases(self) -> dict[str, LeaseHolder]:
        leases = {}
        for path in self._folder.iterdir():
            match = _NAME.match(path.name)
            if match is None or match[1] == self._token:
                continue
            try:
                with path.open("rb", buffering=0) as file:  # opened unbuffered, to avoid a cached copy
                    held = json.loads(file.read(MAX_BYTES))
                leases[match[1]] = LeaseHolder(
                    **{field.name: held[field.name] for field in fields(LeaseHolder) if field.name in held}
                )
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError):
                self._remove_lease_file(match[1])  # truncated when a machine lost its power
        return leases

    def _read_renewal_time(self, token: str) -> object:
        path = self._folder / f".lease-{token}.json"
        if isinstance(path, RemotePath):
            return None  # its content has the number of renewals instead
        try:
            return path.stat().st_mtime_ns
        except OSError:
            return None

    def _remove_lease_file(self, token: str) -> None:
        with contextlib.suppress(OSError, DtctlError):
            (self._folder / f".lease-{token}.json").unlink(missing_ok=True)

    # -- own lease --------------------------------------------------------------------------------------------------

    def _write_own_lease(self) -> None:
        text = json.dumps(asdict(self._holder)).encode()
        if isinstance(self._path, RemotePath):
            with self._path.upload() as out:
                out.write(text)
            return
        # Not synced, since the process ends with a loss of power, too.
        draft = self._path.with_suffix(layout.DRAFT_SUFFIX)
        draft.write_bytes(text)
        draft.replace(self._path)

    def _renew_own_lease(self) -> None:
        every_s = RENEW_REMOTE_S if self._remote else RENEW_S
        while not self._ended.wait(every_s):
            try:
                if isinstance(self._path, Path):
                    os.utime(self._path)  # this needs no space, so it works on a full disk
                elif self._path.exists():
                    self._holder = replace(self._holder, count=self._holder.count + 1)
                    self._write_own_lease()
            except (OSError, DtctlError):
                # The connection may be down, or another writer took the lease, which the commit detects.
                continue

    def _remove_own_lease(self) -> None:
        with contextlib.suppress(OSError, DtctlError):
            self._path.unlink(missing_ok=True)
