"""This worker's own loss of every step since a snapshot, in a file that outlives the process.

The sums of record.py exist for the first steps after a snapshot. Losses cost next to nothing, so there is one of every
step up to the moment of a kill, and a resume compares all that it repeats with them: a schedule that ends, or a counter
that overflows, shows here. Losses are of one training: the file names it by a random text that its snapshots have, too.
"""

from __future__ import annotations

import contextlib
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
from dtctl.runtime.exactness.verdict import Verdict
from dtctl.runtime.snapshot.json_collectives import gathered_json, spread_json
from dtctl.runtime.snapshot.storage.place import Place

FILE: Final = ".losses-rank-{}"
"""File in the run's folder in memory, or that of the snapshots."""
RING: Final = 1 << 16
"""Steps that are kept: the newest, 1 MiB of them."""
_HEADER: Final = struct.Struct("<16s16sq")
"""This training's id, the id of the training whose snapshot it resumed from, and that snapshot's step."""
_ROW: Final = struct.Struct("<q8s")
_PENDING: Final = 64
"""Losses that wait on a GPU, since each read would wait for its kernels."""


class LossRecord:
    """Writes the losses of this process, and has those of the one before; at first neither."""

    def __init__(self) -> None:
        """Nothing is recorded yet."""
        self.then: dict[int, bytes] = {}
        """The losses of an earlier process of the steps after the snapshot, by step; without gaps."""
        self.differs: int | None = None
        """First step whose loss is different now."""
        self.until = 0
        """The step after which workers compare notes; 0 if they have nothing to compare."""
        self.lineage = ""
        """A name for the course that this training takes, the same on all workers; another one after each resume."""
        self._origin = b"", 0
        """Lineage and step of the snapshot that this training resumes from, with the same samples on each worker."""
        self._path: Path | None = None
        self._file = -1
        self._pending: list[tuple[int, torch.Tensor]] = []

    def begin(self, folder: Place, worker: Worker, *, before: str = "", step: int = 0) -> None:
        """Read the losses that an earlier process of this training has left, and reset; collective over all workers.

        Args:
            folder: of the snapshots, for a training without a supervisor. At a URL nothing is kept there.
            worker: this worker.
            before: the lineage that the snapshot is of; empty if there is none.
            step: of the snapshot.
        """
        self.close()
        self.forget()
        self.lineage = spread_json(secrets.token_hex(8), worker, 0)
        base = _choose_folder(folder)
        if base is None:
            return
        self._path = base / FILE.format(worker.rank)
        with contextlib.suppress(OSError, struct.error):
            self.then = _read(self._path.read_bytes(), before.encode(), step) if before else {}
        with contextlib.suppress(OSError):  # training is worth more than its record
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, _HEADER.pack(self.lineage.encode(), b"", 0), 0)
        self._origin = before.encode(), step

    def join_origin(self, *, is_same: bool) -> None:
        """Let the losses count as those of the training that was resumed, or no longer: a difference was seen.

        An attempt after this one may resume from the same snapshot, with what made the difference undone.
        """
        if self._file >= 0 and self._origin[0]:
            with contextlib.suppress(OSError):
                origin = self._origin if is_same else (b"", 0)
                os.pwrite(self._file, _HEADER.pack(self.lineage.encode(), *origin), 0)

    def expect(self, worker: Worker, confirmed: int, end: int) -> None:
        """Compare the losses of steps for which there is no other record; collective over all workers.

        Args:
            worker: this worker.
            confirmed: the last step for which more than the loss is recorded.
            end: of the training; 0 if workers have other samples than then.
        """
        if not end:
            self._origin = b"", 0
        reached = max(gathered_json(max(self.then, default=0), worker))
        self.until = reached if confirmed < reached <= end else 0
        if not self.until:
            self.forget()

    def judge(self, step: int, differing: Sequence[int | None], said: Verdict | None) -> Verdict | None:
        """Return the verdict on a resume with the result of the losses added, once that is known; else None.

        Args:
            step: steps done.
            differing: `differs` of all workers.
            said: the verdict of the first steps.
        """
        found = [number for number in differing if number is not None]
        if said is None or not self.until or (step < self.until and not found):
            return None
        until, self.until = self.until, 0
        if found:
            return replace(said, verdict="not-exact", differs="loss", at=min(found), losses_to=min(found) - 1)
        return replace(said, losses_to=until)

    def forget(self) -> None:
        """Compare no more."""
        self.then, self.differs, self.until = {}, None, 0

    def note(self, step: int, loss: torch.Tensor) -> None:
        """Record the loss of a step, and compare it."""
        if self._file < 0:
            return
        if loss.is_cpu:
            try:
                value = float(loss)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):  # a class of its own
                return
            self._write(step, value)
            return
        self._pending.append((step, loss.detach().clone()))
        if len(self._pending) >= _PENDING:
            self.flush()

    def flush(self) -> None:
        """Write what waits on the GPU."""
        if self._pending:
            values = torch.stack([loss.double() for _, loss in self._pending]).tolist()
            for (step, _), value in zip(self._pending, values, strict=True):
                self._write(step, value)
            self._pending.clear()

    def _write(self, step: int, value: float) -> None:
        bits = struct.pack("<d", value)
        try:  # noqa: SIM105 - `suppress` would be three calls in every step
            os.pwrite(self._file, _ROW.pack(step, bits), _HEADER.size + step % RING * _ROW.size)
        except OSError:
            pass
        if self.then.pop(step, bits) != bits and self.differs is None:
            self.differs = step

    def close(self, *, remove: bool = False) -> None:
        """Write no more; `remove`: nothing will be repeated."""
        with contextlib.suppress(RuntimeError):  # the GPU is gone
            self.flush()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if remove and self._path is not None:
            self._path.unlink(missing_ok=True)


def _choose_folder(snapshots: Place) -> Path | None:
    """Memory of the node, if the run has a folder there: on a disk, each step might wait for a snapshot's fsync."""
    memory = os.environ.get(names.MEMORY_DIR, "")
    if memory and Path(memory).parent.is_dir():
        with contextlib.suppress(OSError, folders.Foreign):
            folders.make_private(memory)
            return Path(memory)
    return snapshots if isinstance(snapshots, Path) else None


def _read(data: bytes, before: bytes, step: int) -> dict[int, bytes]:
    training, parent, began = _HEADER.unpack_from(data)
    if before not in (training.rstrip(b"\0"), parent.rstrip(b"\0") if began == step else None):
        return {}
    found: dict[int, bytes] = {}
    for number in range(step + 1, step + 1 + RING):
        offset = _HEADER.size + number % RING * _ROW.size
        if offset + _ROW.size > len(data):
            break
        recorded, bits = _ROW.unpack_from(data, offset)
        if recorded != number:
            break
        found[number] = bits
    return found
