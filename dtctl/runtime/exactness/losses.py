"""This worker's own loss of every step since a snapshot, in a file that remains after the process has ended.

The sums of record.py exist only for the first steps after a snapshot. A loss costs almost nothing, so every step up to
a kill has a record, and a resume compares all steps that it repeats with these records. This detects a schedule that
ends, or a counter that overflows. The file names its run by a random text, which is also in the snapshots of the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from dtctl import folders, names
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.exactness.verdict import ExactnessVerdict
from dtctl.runtime.snapshot.json_collectives import gather_json, spread_json
from dtctl.runtime.snapshot.storage.place import Place

FILE: Final = ".losses-rank-{}"
"""Name of the file, in the run's folder in memory or in the folder of the snapshots."""
RING: Final = 1 << 16
"""Number of the newest steps that are kept, 1 MiB in total."""
_HEADER: Final = struct.Struct("<16s16sq")
"""Id of this run, id of the run with the snapshot that it resumed from, and step of that snapshot."""
_ROW: Final = struct.Struct("<q8s")
_PENDING: Final = 64
"""Number of losses that wait on a GPU, since each read would wait for its kernels."""


class LossRecord:
    """Writer of the losses of this process, and reader of those of the previous one."""

    def __init__(self) -> None:
        """Start without losses; `begin` reads those of an earlier process."""
        self.then: dict[int, bytes] = {}
        """Losses of an earlier process for the steps after the snapshot, by step; without gaps."""
        self.differs: int | None = None
        """First step whose loss differs from the record."""
        self.until = 0
        """Step after which workers exchange their results; 0 if there is nothing to compare."""
        self.lineage = ""
        """Random id of the run from its last resume on, the same on all workers."""
        self._origin = b"", 0
        """Lineage and step of the snapshot that this run resumed from, with the same samples on each worker."""
        self._path: Path | None = None
        self._file = -1
        self._pending: list[tuple[int, torch.Tensor]] = []

    def begin(self, folder: Place, worker: Worker, *, before: str = "", step: int = 0) -> None:
        """Read the losses that an earlier process of this run has left, and begin a new record; collective.

        Args:
            folder: place of the snapshots, used if there is no supervisor. No losses are kept for snapshots at a URL.
            worker: this worker.
            before: lineage of the snapshot; empty if there is none.
            step: step of the snapshot.
        """
        self.close()
        self.stop_loss_comparison()
        self.lineage = spread_json(secrets.token_hex(8), worker, 0)
        base = _choose_folder(folder)
        if base is None:
            return
        self._path, self._origin = base / FILE.format(worker.rank), (before.encode(), step)
        with contextlib.suppress(OSError, struct.error):
            self.then = _parse_loss_rows(self._path.read_bytes(), before.encode(), step) if before else {}
        with contextlib.suppress(OSError):  # an error here must not end the run
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, 0)
        self.join_origin(is_same=False)

    def join_origin(self, *, is_same: bool) -> None:
        """Mark the losses as a continuation of the resumed run, or remove the mark after a difference was seen.

        A later attempt may resume from the same snapshot after the cause of the difference was removed.
        """
        if self._file >= 0:
            with contextlib.suppress(OSError):
                origin = self._origin if is_same else (b"", 0)
                os.pwrite(self._file, _HEADER.pack(self.lineage.encode(), *origin), 0)

    def start_loss_comparison(self, worker: Worker, confirmed: int, end: int) -> None:
        """Start to compare the losses of steps without another record; collective over all workers.

        Args:
            worker: this worker.
            confirmed: last step whose record has more than the loss.
            end: last step of the run; 0 if workers have other samples than before.
        """
        if not end:
            self._origin = b"", 0
        reached = max(gather_json(max(self.then, default=0), worker))
        self.until = reached if confirmed < reached <= end else 0
        if not self.until:
            self.stop_loss_comparison()

    def add_loss_result(
        self, step: int, differing: Sequence[int | None], said: ExactnessVerdict | None
    ) -> ExactnessVerdict | None:
        """Return the verdict on a resume with the result of the losses added; None while it is open.

        Args:
            step: number of steps done.
            differing: the values of `differs` of all workers.
            said: verdict on the first steps.
        """
        found = [number for number in differing if number is not None]
        if said is None or not self.until or (step < self.until and not found):
            return None
        until, self.until = self.until, 0
        if found:
            return replace(said, verdict="not-exact", differs="loss", at=min(found), losses_to=min(found) - 1)
        return replace(said, losses_to=until)

    def stop_loss_comparison(self) -> None:
        """Stop comparing losses with those of an earlier process."""
        self.then, self.differs, self.until = {}, None, 0

    def record_loss(self, step: int, loss: torch.Tensor) -> None:
        """Record the loss of a step, and compare it with the earlier one."""
        if self._file < 0:
            return
        if loss.is_cpu:
            try:
                value = float(loss)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):  # a loss of an unusual class
                return
            self._write_loss_row(step, value)
            return
        self._pending.append((step, loss.detach().clone()))
        if len(self._pending) >= _PENDING:
            self.flush()

    def flush(self) -> None:
        """Write the losses that wait on the GPU."""
        if self._pending:
            values = torch.stack([loss.double() for _, loss in self._pending]).tolist()
            for (step, _), value in zip(self._pending, values, strict=True):
                self._write_loss_row(step, value)
            self._pending.clear()

    def _write_loss_row(self, step: int, value: float) -> None:
        bits = struct.pack("<d", value)
        try:  # noqa: SIM105 - `suppress` would be three calls in every step
            os.pwrite(self._file, _ROW.pack(step, bits), _HEADER.size + step % RING * _ROW.size)
        except OSError:
            pass
        if self.then.pop(step, bits) != bits and self.differs is None:
            self.differs = step

    def close(self, *, remove: bool = False) -> None:
        """Close the file. If `remove` is true, delete it, since no step will be repeated."""
        with contextlib.suppress(RuntimeError):  # the GPU may have failed
            self.flush()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if remove and self._path is not None:
            self._path.unlink(missing_ok=True)


def _choose_folder(snapshots: Place) -> Path | None:
    """Return the run's folder in memory, if it has one; on a disk, a step might wait for a snapshot's fsync."""
    memory = os.environ.get(names.MEMORY_DIR, "")
    if memory and Path(memory).parent.is_dir():
        with contextlib.suppress(OSError, folders.NotPrivateError):
            folders.make_private(memory)
            return Path(memory)
    return snapshots if isinstance(snapshots, Path) else None


def _parse_loss_rows(data: bytes, before: bytes, step: int) -> dict[int, bytes]:
    """Return the losses of the steps after a snapshot, up to the first step that is missing; none of another run."""
    training, parent, began = _HEADER.unpack_from(data)
    if before not in (training.rstrip(b"\0"), parent.rstrip(b"\0") if began == step else None):
        return {}
    rows = dict(_ROW.iter_unpack(data[_HEADER.size : len(data) - (len(data) - _HEADER.size) % _ROW.size]))
    return {number: rows[number] for number in itertools.takewhile(rows.__contains__, itertools.count(step + 1))}
