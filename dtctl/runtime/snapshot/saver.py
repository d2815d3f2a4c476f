"""Snapshots beside training: it stops for a copy; digests, writing and waiting for the disk happen in a thread.

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
from dtctl.runtime.console import complain
from dtctl.runtime.snapshot import write
from dtctl.runtime.snapshot.storage import retention
from dtctl.runtime.snapshot.storage.durable import written
from dtctl.runtime.snapshot.storage.lease import Lease
from dtctl.runtime.snapshot.storage.place import Place, Remote, place
from dtctl.runtime.snapshot.storage.staging import Staged, Staging

if TYPE_CHECKING:
    from typing_extensions import Self


class Saver:
    """Writes the snapshots of a training one at a time, with one copy of the state in memory.

    Attributes:
        failed: saves that failed since the last one that did not.
        collective: whether all workers write (distributed_saver.py).
        in_pieces: whether each gives what it has, rather than one everything.
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
        complain: Callable[[DtctlError], None] = complain,
        committed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Store the settings; nothing is written or allocated yet.

        Args:
            folder: of all snapshots of the run, or its URL; made if needed.
            keep: how many snapshots to keep.
            keep_every_s: of older ones, those that are so many seconds apart are kept as well.
            when_busy: what a save does that comes while one is under way.
            max_failed: consecutive saves that may fail before `save` raises.
            in_memory: whether the folder lies in the memory of the nodes.
            complain: called with each failure at once, from the writing thread; prints to standard error by default.
            committed: called with each step whose snapshot is durable, from the writing thread.
        """
        self._folder, self._when_busy, self._max_failed = place(folder), when_busy, max_failed
        self._keep, self._keep_every_s, self._in_memory = keep, keep_every_s, in_memory
        self._complain, self._committed = complain, committed
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: DtctlError | None = None
        self._lease: Lease | None = None
        self._notes = Notes()
        self.failed = 0

    def open(self) -> None:
        """Check that the folder can be written, and keep every other run from writing there until the end.

        The first `save` calls it if it was not called.

        Raises:
            SnapshotError: another run writes there, or the folder cannot be written.
        """
        if self._lease is None:
            lease = Lease(self._folder)
            lease.acquire()
            self._lease = lease

    def close(self) -> None:
        """Let other runs write; nothing is being written any more."""
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
        """Copy the state, and start to write it in the thread.

        Args:
            step: optimizer steps done.
            parts: name -> tensors and JSON's values in dicts and lists; one file each.
            facts: JSON for the loop, returned by a resume.
            best: steps whose snapshots are kept on top of the newest.
            needed: never skip it.

        Returns:
            False if it was skipped, since another one is under way.

        Raises:
            SnapshotError: `max_failed` saves failed one after another, or the state has what snapshots do not keep.
        """
        self.open()
        if self._when_busy == "skip" and self.busy and not needed:
            return False
        self.wait()
        if self._error is not None and self.failed >= self._max_failed:
            raise self._error
        staged = self._staging.take(parts)
        # No daemon: should the process end with an error, what was begun is finished.
        rule = retention.RetentionRule(keep=self._keep, every_s=self._keep_every_s, best=frozenset(best))
        now = json.loads(json.dumps({**facts, retention.FACT: rule.document()}))  # the caller may change them
        self._notes.begin(step)
        self._thread = threading.Thread(target=self._write, args=(step, staged, now, rule), name="snapshot")
        self._thread.start()
        return True

    def annotate(self, step: int, name: str, text: str) -> None:
        """Write a small file beside the snapshot of a step, now or when that is committed.

        It is no part of the snapshot: after a failure of the machine, or of the disk, it may be missing.

        Args:
            step: of a snapshot that was begun; nothing is written if there is none.
            name: of the file, which is replaced.
            text: what it has.
        """
        self._notes.put(step, name, text)

    def rejoin(self) -> None:
        """The workers have another process group; collective, if saving is."""

    def finish(self) -> None:
        """Wait until the last snapshot is durable.

        Raises:
            SnapshotError: it could not be written.
        """
        self.wait()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """`finish`; after an error, what was begun is written all the same, and that error is the one that counts."""
        try:
            if kind is None:
                self.finish()
            else:
                self.wait()
        finally:
            self.close()

    def wait(self) -> None:
        """Return when nothing is being written, whether it was written well or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._notes.wait()

    def _write(self, step: int, staged: Staged, facts: Mapping[str, Any], rule: retention.RetentionRule) -> None:
        try:
            target = self._write_staged(step, staged, facts, rule)
            self._committed(step)
            self._notes.commit(step, target)
        except Exception as exc:  # noqa: BLE001  # whatever it is, training must learn of it
            wrapped = SnapshotError(f"the snapshot of step {step} cannot be written: {exc!r}", where=str(self._folder))
            self._error = exc if isinstance(exc, DtctlError) else wrapped
            self.failed += 1
            self._complain(self._error)
        else:
            self._error, self.failed = None, 0

    def _write_staged(
        self, step: int, staged: Staged, facts: Mapping[str, Any], rule: retention.RetentionRule
    ) -> Place | None:
        """Write and commit a snapshot. Returns its folder, if this worker is the one that writes there."""
        assert self._lease is not None  # noqa: S101  # for the type checker
        return write.write(
            self._folder, step, staged, facts=facts, rule=rule, in_memory=self._in_memory,
            before_commit=self._lease.require, add_notes=partial(self._notes.add, step),
        )  # fmt: skip


class Notes:
    """Small files beside snapshots, which may be asked for before there is a folder to write them to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: dict[int, Place | None] = {}
        """Step -> its snapshot's folder, once that is committed; of the newest ones."""
        self._texts: dict[int, dict[str, str]] = {}
        self._upload: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """Take texts for the snapshot of a step."""
        with self._lock:
            self._folders[step], self._texts[step] = None, {}
            for old in list(self._folders)[: -2 - MOST_WAITING]:
                del self._folders[old], self._texts[old]

    def put(self, step: int, name: str, text: str) -> None:
        """Write a text if the snapshot is committed; else keep it until then."""
        with self._lock:
            if step in self._folders:
                self._texts[step][name] = text
                self._write(step)

    def add(self, step: int, draft: Place) -> None:
        """Write what there is to a draft that is about to get its name, so that it appears with the snapshot."""
        with self._lock:
            if isinstance(draft, Path) and step in self._texts:
                _write_texts(draft, self._texts[step])

    def commit(self, step: int, folder: Place | None) -> None:
        """Write what there is for a snapshot that was committed, and from now on what comes."""
        with self._lock:
            if step in self._folders:
                self._folders[step] = folder
                self._write(step)

    def wait(self) -> None:
        """Return when nothing is being uploaded."""
        if self._upload is not None:
            self._upload.join()
            self._upload = None

    def _write(self, step: int) -> None:
        folder = self._folders[step]
        if folder is None:
            return
        texts, self._texts[step] = self._texts[step], {}
        if isinstance(folder, Remote):  # training doesn't wait for a store
            before = self._upload
            self._upload = threading.Thread(target=_upload, args=(before, folder, texts), name="notes")
            self._upload.start()
        else:
            _write_texts(folder, texts)


MOST_WAITING: Final = 2
"""Snapshots before the newest that may still get notes."""


def _upload(before: threading.Thread | None, folder: Place, texts: Mapping[str, str]) -> None:
    if before is not None:
        before.join()
    _write_texts(folder, texts)


def _write_texts(folder: Place, texts: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError, SnapshotError):  # it may be full, or removed, since there is a newer one
        for name, text in texts.items():
            if isinstance(folder, Remote):
                with written(folder / name) as out:
                    write.write_all(out, memoryview(text.encode()))
            else:
                draft = folder / f".{name}.part"
                draft.write_text(text)
                draft.replace(folder / name)
