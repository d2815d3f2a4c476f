"""Record of the steps after a snapshot, by which a resume that repeats them is confirmed or refuted.

The record has, for each of these steps, the bits of every worker's loss, a sum of all gradients before they are
clipped, and a sum of all parameters after the update (bits.py). It lies next to the snapshot on every node that has it.
A resumed run computes these values once more. Only the comparison of the bits decides whether it is exact.

Each worker sums its own pieces, each piece is counted once, and the sums are added up over workers. So they do not
depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn

from dtctl.errors import SnapshotError
from dtctl.runtime.bits import MODULUS, sum_tensors
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.exactness.losses import LossRecord
from dtctl.runtime.exactness.verdict import ExactnessVerdict, Kind
from dtctl.runtime.snapshot.format.layout import read_file_size
from dtctl.runtime.snapshot.format.pieces import PieceAssignment, extract_local_pieces
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.runtime.snapshot.saver import Saver
from dtctl.runtime.snapshot.state import name_parameters
from dtctl.runtime.snapshot.storage.place import Place, RemotePath, parse_place

STEPS: Final = 2
"""Number of steps after a snapshot that are recorded; the second one uses the parameters that the first one made."""
FILE: Final = "next-steps.json"
"""File in the folder of a snapshot."""
MAX_BYTES: Final = 16 << 20
"""Largest size of a record; a longer file is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBits:
    """Bits of one step, on all workers."""

    step: int
    losses: tuple[int | None, ...]
    """Bits of each worker's own loss, by rank; None for a worker that received the step from another one."""
    gradient: int
    update: int

    def document(self) -> dict[str, Any]:
        """Return the record as JSON."""
        losses = [None if bits is None else f"{bits:016x}" for bits in self.losses]
        return {
            "step": self.step, "losses": losses, "gradient": f"{self.gradient:016x}", "update": f"{self.update:016x}"
        }  # fmt: skip

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> StepBits:
        """Read the result of `document`.

        Raises:
            LookupError, TypeError, ValueError: the document is something else.
        """
        losses = tuple(None if text is None else int(text, 16) for text in document["losses"])
        gradient, update = int(document["gradient"], 16), int(document["update"], 16)
        return cls(step=int(document["step"]), losses=losses, gradient=gradient, update=update)

    def compare(self, then: StepBits, *, losses: bool) -> Kind | None:
        """Return the first value that differs from the record; None if the step was repeated exactly.

        Args:
            then: record of the same step.
            losses: True if each worker had the same samples when the record was made.
        """
        if losses and len(self.losses) == len(then.losses):
            for one, other in zip(self.losses, then.losses, strict=True):
                if one is not None and other is not None and one != other:
                    return "loss"
        if self.gradient != then.gradient:
            return "gradient"
        return "update" if self.update != then.update else None


@dataclass(slots=True)
class _RecordedSnapshot:
    """A snapshot whose next steps are recorded."""

    step: int
    saver: Saver
    rows: list[StepBits] = field(default_factory=list)


class StepRecorder:
    """Recorder of the steps after snapshots, which also compares repeated steps with their record."""

    def __init__(self, worker: Worker, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Prepare to record the steps after the next snapshot.

        Args:
            worker: this worker.
            model: the model as this worker has it.
            optimizer: optimizer of its parameters.
        """
        self._worker, self._model, self._optimizer = worker, model, optimizer
        self._owned: dict[str, torch.Tensor] | None = None
        self._targets: list[_RecordedSnapshot] = []
        self._expected: dict[int, StepBits] = {}
        """Records of the steps whose repetition is under way, by step; empty if none is."""
        self._verdict: ExactnessVerdict | None = None
        """Verdict on the resume by the steps that were repeated so far. It already has a difference if the step that
        differs is computed once more."""
        self._sums: dict[tuple[str, int], int | None] = {}
        """Kind of value and step -> sum over this worker's pieces; None for tensors whose bits cannot be read."""
        self.losses = LossRecord()
        """Losses of this worker."""
        self._row: StepBits | None = None
        """Bits of the newest recorded step."""
        self._spent_s = 0.0

    @property
    def is_pending(self) -> bool:
        """Return whether the verdict on repeated steps is still open."""
        return bool(self._expected)

    @property
    def is_recording(self) -> bool:
        """Return whether a record of the steps after a snapshot is still incomplete."""
        return bool(self._targets)

    def is_wanted(self, number: int) -> bool:
        """Return whether the bits of this step are needed; the result is the same on all workers."""
        if number == self.losses.until or number in self._expected:
            return True
        for target in self._targets:  # noqa: SIM110 - most often none, asked for three times in every step
            if target.step < number <= target.step + STEPS:
                return True
        return False

    def start_recording(self, step: int, saver: Saver) -> None:
        """Record the next steps for a snapshot that has just begun; collective.

        Args:
            step: number of steps done.
            saver: writer of the snapshot.
        """
        self._find_owned_parameters()
        self._targets.append(_RecordedSnapshot(step, saver))

    def start_step_comparison(
        self, step: int, rows: Sequence[StepBits], known: Sequence[str], *, end: int, losses: bool
    ) -> ExactnessVerdict | None:
        """Start to compare the next steps with their record; collective.

        Args:
            step: step of the snapshot.
            rows: record of the steps after it.
            known: known differences, a phrase each.
            end: last step of the run.
            losses: True if each worker has the same samples as before.

        Returns:
            The verdict, if no recorded step will be repeated; else None.
        """
        self._find_owned_parameters()
        self._expected = {row.step: row for row in rows if step < row.step <= end}
        self.losses.start_loss_comparison(self._worker, step + len(self._expected), end if losses else 0)
        unrecorded = f"step {step + 1} was not recorded before the last attempt ended"
        why = tuple(known) if self._expected else (*known, unrecorded)
        self._verdict = ExactnessVerdict(
            verdict="not-confirmed" if why else "exact", step=step, steps=0, why=why, has_losses=losses
        )
        if self._expected:
            return None
        self.losses.join_origin(is_same=True)
        return self._verdict

    def recheck_step(self, verdict: ExactnessVerdict) -> None:
        """Compare this step with its repetition from the same state.

        Args:
            verdict: verdict that this step differs from the record.
        """
        assert self._row is not None  # noqa: S101  # for the type checker
        self._expected, self._verdict = {self._row.step: self._row}, verdict

    def stop_comparison(self, why: str) -> ExactnessVerdict | None:
        """Stop recording and comparing the steps under way.

        Args:
            why: the reason.

        Returns:
            The verdict on a resume whose steps were being compared.
        """
        verdict = self._verdict if self._expected else None
        self._owned, self._expected = None, {}
        self.losses.stop_loss_comparison()
        self._targets.clear()
        if verdict is None:
            return None
        if verdict.differs is not None:
            return replace(verdict, repeats=True)
        return verdict if verdict.steps else replace(verdict, verdict="not-confirmed", why=(why,))

    def _find_owned_parameters(self) -> None:
        """Find the parameters whose pieces are counted on this worker; each piece is counted on one worker.

        The first call is collective.
        """
        if self._owned is None:
            names = name_parameters(self._model, self._optimizer)
            trained = {name: parameter for parameter, name in names.items() if parameter.requires_grad}
            pieces = extract_local_pieces({"parameters": trained})
            mine = PieceAssignment(self._worker, lambda _: False).select_own_pieces(pieces).get("parameters", {})
            self._owned = {name: parameter for name, parameter in trained.items() if name in mine}

    def take_gradient(self, number: int, loss: torch.Tensor | None) -> None:
        """Sum the gradients of a step before they are clipped, and store this worker's loss."""
        owned = self._owned or {}
        gradients = {name: tensor.grad for name, tensor in owned.items() if tensor.grad is not None}
        self._sums = {("gradient", number): self._sum_if_possible(gradients)}
        if loss is not None:
            self._sums["loss", number] = self._sum_if_possible({"loss": loss})

    def take_update(self, number: int) -> None:
        """Sum the parameters after a step."""
        self._sums["update", number] = self._sum_if_possible(self._owned or {})

    def _sum_if_possible(self, tensors: Mapping[str, torch.Tensor]) -> int | None:
        """Return the sum; None for tensors of a class without plain numbers, which must not end the run."""
        began_s = time.perf_counter()
        try:
            return sum_tensors(tensors)
        except (RuntimeError, TypeError, NotImplementedError, ValueError):
            return None
        finally:
            self._spent_s += time.perf_counter() - began_s

    def pop_spent_s(self) -> float:
        """Return the seconds that the sums have taken since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def exchange(self, step: int) -> ExactnessVerdict | None:
        """Gather the bits of a step from all workers, record and compare them; collective.

        Args:
            step: number of the newest step done.

        Returns:
            The verdict on the repeated steps, once it is known; else None.
        """
        taken = [self._sums.get((kind, step)) for kind in ("loss", "gradient", "update")]
        self.losses.flush()
        reports = gather_json([*taken, self.losses.differs], self._worker)
        losses, gradients, updates, differing = zip(*reports, strict=True)
        row = None
        if None not in (*gradients, *updates):
            row = StepBits(step=step, losses=losses, gradient=sum(gradients) % MODULUS, update=sum(updates) % MODULUS)
        self._row = row
        for target in self._targets:
            if row is not None and step == target.step + len(target.rows) + 1:
                target.rows.append(row)
                target.saver.annotate(target.step, FILE, format_step_bits(target.rows))
        self._targets = [target for target in self._targets if step < target.step + STEPS]
        verdict = None
        if step in self._expected:
            verdict = self._compare_repeated_step(row)
        elif not self._expected:
            verdict = self.losses.add_loss_result(step, differing, self._verdict)
        if verdict is not None:
            self.losses.join_origin(is_same=verdict.differs is None)
            if verdict.differs is not None:
                self.losses.stop_loss_comparison()
        return verdict

    def _compare_repeated_step(self, row: StepBits | None) -> ExactnessVerdict | None:
        verdict = self._verdict
        assert verdict is not None  # noqa: S101  # for the type checker
        if row is None:  # a worker that received this step from a peer has no sums of it
            return self.stop_comparison(f"a worker was replaced in step {verdict.step + 1}")
        is_again = verdict.differs is not None  # the same step in the same process, so its samples are the same
        differs = row.compare(self._expected[row.step], losses=verdict.has_losses or is_again)
        if is_again:
            verdict = replace(verdict, repeats=differs not in ("loss", "gradient"))
        elif differs is not None:
            verdict = replace(verdict, verdict="not-exact", differs=differs, at=row.step)
        else:
            verdict = replace(verdict, steps=verdict.steps + 1)
        self._verdict = verdict
        if verdict.differs is None and verdict.steps < len(self._expected):
            return None
        self._expected = {}
        return verdict


def format_step_bits(rows: Sequence[StepBits]) -> str:
    """Return the text of the file next to a snapshot: the steps, and a digest of them."""
    steps = [row.document() for row in rows]
    return json.dumps({"steps": steps, "digest": _compute_steps_digest(steps)}, indent=1) + "\n"


def parse_step_bits(text: str) -> list[StepBits]:
    """Return the steps in a text of `format_step_bits`; empty if it is damaged, or is something else."""
    with contextlib.suppress(LookupError, TypeError, ValueError, RecursionError):
        document = json.loads(text)
        if document["digest"] == _compute_steps_digest(document["steps"]):
            return [StepBits.from_document(row) for row in document["steps"]]
    return []


def _compute_steps_digest(steps: object) -> str:
    return hashlib.sha256(json.dumps(steps).encode()).hexdigest()


def gather_step_record(snapshot: str, worker: Worker) -> list[StepBits]:
    """Return the longest record after a snapshot that any node has; collective.

    Args:
        snapshot: folder or URL of the snapshot, on each node that has it.
        worker: this worker.
    """
    path = parse_place(snapshot)
    looks = worker.is_first if isinstance(path, RemotePath) else worker.local_rank == 0
    texts = gather_json(_read_text(path / FILE) if looks else "", worker)
    return max(map(parse_step_bits, texts), key=len)


def _read_text(path: Place) -> str:
    try:
        return path.read_text() if read_file_size(path) <= MAX_BYTES else ""
    except (OSError, ValueError, SnapshotError):  # there is no record, or it is not text
        return ""
