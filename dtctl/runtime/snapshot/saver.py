"""Snapshots during training, which pauses only for a copy. A thread hashes, writes and waits for the disk.

The thread holds the interpreter's lock for microseconds at a time: hashing, writing and fsync release it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from dtctl.errors import DtctlError, SnapshotError
from dtctl.runtime.console import write_error_to_stderr
from dtctl.runtime.snapshot import write
from dtctl.runtime.snapshot.storage import retention
from dtctl.runtime.snapshot.storage.durable import open_durable_file
from dtctl.runtime.snapshot.storage.lease import Lease
from dtctl.runtime.snapshot.storage.place import Place, RemotePath, parse_place
from dtctl.runtime.snapshot.storage.staging import StagedState, StagingBuffer

if TYPE_CHECKING:
    from typing_extensions import Self


class Saver:
    """Writer of a run's snapshots, one at a time, with one copy of the state in memory.

    Attributes:
        failed: number of saves that have failed since the last success.
        collective: True if all workers write (distributed_saver.py).
        in_pieces: True if each worker passes its own part of the state, False if one worker passes everything.
    """

    collective = False
    in_pieces = False

    def __init__(
        self,
        folder: str | Place,
        *,
        keep: int = 2,
        keep_every_s: float | None = None,
        when_busy: Literal["wait", "skip"] = "wait",
        max_failed: int = 3,
        in_memory: bool = False,
        complain: Callable[[DtctlError], None] = write_error_to_stderr,
        committed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Store the settings, without writing or allocating anything.

        Args:
            folder: folder for all snapshots of the run, or its URL; made if needed.
            keep: number of snapshots to keep.
            keep_every_s: interval in seconds at which older snapshots are kept as well.
            when_busy: action of a save while another one is under way.
            max_failed: number of consecutive failed saves after which `save` raises.
            in_memory: True if the folder lies in the memory of the nodes.
            complain: called with each failure at once, from the writing thread; prints to standard error by default.
            committed: called with each step whose snapshot is durable, from the writing thread.
        """
        self._folder, self._when_busy, self._max_failed = parse_place(folder), when_busy, max_failed
        self._keep, self._keep_every_s, self._in_memory = keep, keep_every_s, in_memory
        self._complain, self._committed = complain, committed
        self._staging = StagingBuffer()
        self._thread: threading.Thread | None = None
        self._error: DtctlError | None = None
        self._lease: Lease | None = None
        self._notes = SnapshotNotes()
        self.failed = 0

    def open(self) -> None:
        """Check that the folder can be written, and prevent every other run from writing there until `close`.

        The first `save` calls it if the caller has not.

        Raises:
            SnapshotError: another run writes there, or the folder cannot be written.
        """
        if self._lease is None:
            lease = Lease(self._folder)
            lease.acquire()
            self._lease = lease

    def close(self) -> None:
        """Release the folder for other runs, after all writing has ended."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    @property
    def busy(self) -> bool:
        """Return whether a snapshot is being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        step: int,
        parts: Mapping[str, Any],
        *,
        facts: Mapping[str, Any],
        best: Collection[int] = (),
        needed: bool = False,
    ) -> bool:
        """Copy the state, and begin to write it in the thread.

        Args:
            step: number of optimizer steps done.
            parts: name -> tensors and JSON's values in dicts and lists; one file each.
            facts: JSON for the loop, which a resume returns.
            best: steps whose snapshots are kept in addition to the newest.
            needed: True if the snapshot must not be skipped.

        Returns:
            False if the snapshot was skipped because another one is under way.

        Raises:
            SnapshotError: `max_failed` consecutive saves failed, or the state contains values that snapshots cannot
                keep.
        """
        self.open()
        if self._when_busy == "skip" and self.busy and not needed:
            return False
        self.wait()
        if self._error is not None and self.failed >= self._max_failed:
            raise self._error
        staged = self._staging.stage_tensors(parts)
        # Not a daemon: if the process ends with an error, the snapshot under way is still completed.
        rule = retention.RetentionRule(keep=self._keep, every_s=self._keep_every_s, best=frozenset(best))
        # a copy, since the caller may change the facts
        now = json.loads(json.dumps({**facts, retention.FACT: rule.document()}))
        self._notes.begin(step)
        self._thread = threading.Thread(
            target=self._run_snapshot_write, args=(step, staged, now, rule), name="snapshot"
        )
        self._thread.start()
        return True

    def annotate(self, step: int, name: str, text: str) -> None:
        """Write a small file next to the snapshot of a step, now or when the snapshot is committed.

        It is not part of the snapshot: after a failure of the machine or the disk it may be missing.

        Args:
            step: step of a snapshot that was begun; nothing is written if there is none.
            name: name of the file, which is replaced.
            text: content of the file.
        """
        self._notes.put(step, name, text)

    def rejoin(self) -> None:
        """Continue with a new process group of the workers; collective if saving is collective."""

    def finish(self) -> None:
        """Wait until the last snapshot is durable.

        Raises:
            SnapshotError: the snapshot could not be written.
        """
        self.wait()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Call `finish`; after an error, complete the snapshot under way and let that error pass."""
        try:
            if kind is None:
                self.finish()
            else:
                self.wait()
        finally:
            self.close()

    def wait(self) -> None:
        """Wait until nothing is being written, whether or not the last snapshot succeeded."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._notes.wait()

    def _run_snapshot_write(
        self, step: int, staged: StagedState, facts: Mapping[str, Any], rule: retention.RetentionRule
    ) -> None:
        try:
            target = self._write_staged(step, staged, facts, rule)
            self._committed(step)
            self._notes.commit(step, target)
        except Exception as exc:  # noqa: BLE001  # training must learn of any error
            wrapped = SnapshotError(f"the snapshot of step {step} cannot be written: {exc!r}", where=str(self._folder))
            self._error = exc if isinstance(exc, DtctlError) else wrapped
            self.failed += 1
            self._complain(self._error)
        else:
            self._error, self.failed = None, 0

    def _write_staged(
        self, step: int, staged: StagedState, facts: Mapping[str, Any], rule: retention.RetentionRule
    ) -> Place | None:
        """Write and commit a snapshot; return its folder if this worker writes there, else None."""
        assert self._lease is not None  # noqa: S101  # for the type checker
        return write.write_staged_snapshot(
            self._folder, step, staged, facts=facts, rule=rule, in_memory=self._in_memory,
            before_commit=self._lease.require, add_notes=partial(self._notes.add, step),
        )  # fmt: skip


class SnapshotNotes:
    """Small files next to snapshots, which may be requested before the snapshot's folder exists."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: dict[int, Place | None] = {}
        """Step -> folder of its snapshot, None until it is committed; for the newest snapshots."""
        self._texts: dict[int, dict[str, str]] = {}
        self._upload: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """Accept texts for the snapshot of a step."""
        with self._lock:
            self._folders[step], self._texts[step] = None, {}
            for old in list(self._folders)[: -2 - MOST_WAITING]:
                del self._folders[old], self._texts[old]

    def put(self, step: int, name: str, text: str) -> None:
        """Write a text if the snapshot is committed; else keep it until the commit."""
        with self._lock:
            if step in self._folders:
                self._texts[step][name] = text
                self._write_step_notes(step)

    def add(self, step: int, draft: Place) -> None:
        """Write the waiting texts to a draft before it is renamed, so that they appear together with the snapshot."""
        with self._lock:
            if isinstance(draft, Path) and step in self._texts:
                _write_texts(draft, self._texts[step])

    def commit(self, step: int, folder: Place | None) -> None:
        """Write the waiting texts for a committed snapshot; later ones are written at once."""
        with self._lock:
            if step in self._folders:
                self._folders[step] = folder
                self._write_step_notes(step)

    def wait(self) -> None:
        """Wait until nothing is being uploaded."""
        if self._upload is not None:
            self._upload.join()
            self._upload = None

    def _write_step_notes(self, step: int) -> None:
        folder = self._folders[step]
        if folder is None:
            return
        texts, self._texts[step] = self._texts[step], {}
        if isinstance(folder, RemotePath):  # an upload runs in a thread, so that training does not wait for it
            before = self._upload
            self._upload = threading.Thread(target=_upload_notes, args=(before, folder, texts), name="notes")
            self._upload.start()
        else:
            _write_texts(folder, texts)


MOST_WAITING: Final = 2
"""Largest number of older snapshots whose notes wait for their upload."""


def _upload_notes(before: threading.Thread | None, folder: Place, texts: Mapping[str, str]) -> None:
    if before is not None:
        before.join()
    _write_texts(folder, texts)


def _write_texts(folder: Place, texts: Mapping[str, str]) -> None:
    # the disk may be full, or the folder removed because of a newer snapshot
    with contextlib.suppress(OSError, SnapshotError):
        for name, text in texts.items():
            if isinstance(folder, RemotePath):
                with open_durable_file(folder / name) as out:
                    write.write_whole_chunk(out, memoryview(text.encode()))
            else:
                draft = folder / f".{name}.part"
                draft.write_text(text)
                draft.replace(folder / name)
