"""Record of the steps after a snapshot, by which a resume that repeats them is confirmed or refuted.

The record has, for each of these steps, the bits of every worker's loss, a sum of all gradients before they are
clipped, and a sum of all parameters after the update (bits.py). It lies next to the snapshot on every node that has it.
A resumed run computes these values once more. Only the comparison of the bits decides whether it is exact.

Each worker sums its own pieces, each piece is counted once, and the sums are added up over workers. So they do not
depend on the number of workers.
"""

from __future__ import annotations

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
from dtctl.runtime.snapshot.format.layout import size_bytes
from dtctl.runtime.snapshot.format.pieces import PieceAssignment, extract_local_pieces
from dtctl.runtime.snapshot.json_collectives import gathered_json
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


@dataclass(slots=True)
class _ResumedSnapshot:
    """A snapshot that the run has resumed from."""

    step: int
    rows: dict[int, StepBits]
    losses: bool
    known: tuple[str, ...]
    repeated: int = 0
    doubted: ExactnessVerdict | None = None
    """Verdict to return if the repeated step gives the same values."""


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
        self._expected: _ResumedSnapshot | None = None
        self._gradient: tuple[int, int | None] | None = None
        """Step, and the sum over this worker's pieces; None as the sum for tensors whose bits cannot be read."""
        self._update: tuple[int, int | None] | None = None
        self._loss: tuple[int, int | None] | None = None
        self.losses = LossRecord()
        """Losses of this worker."""
        self._said: ExactnessVerdict | None = None
        """Newest verdict on the resume that has been reported."""
        self._row: StepBits | None = None
        """Bits of the newest recorded step."""
        self._spent_s = 0.0

    @property
    def is_pending(self) -> bool:
        """Return whether the verdict on repeated steps is still open."""
        return self._expected is not None

    @property
    def is_recording(self) -> bool:
        """Return whether a record of the steps after a snapshot is still incomplete."""
        return bool(self._targets)

    def is_wanted(self, number: int) -> bool:
        """Return whether the bits of this step are needed; the result is the same on all workers."""
        if number == self.losses.until or (self._expected is not None and number in self._expected.rows):
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
        following = {row.step: row for row in rows if step < row.step <= end}
        in_order = {
            number: following[number] for number in range(step + 1, step + 1 + len(following)) if number in following
        }
        self.losses.start_loss_comparison(self._worker, step + len(in_order), end if losses else 0)
        why = f"step {step + 1} was not recorded before the last attempt ended"
        self._said = ExactnessVerdict(verdict="not-confirmed", step=step, steps=0, why=(*known, why))
        self._expected = _ResumedSnapshot(step, in_order, losses, tuple(known)) if in_order else None
        if in_order:
            return None
        self.losses.join_origin(is_same=True)
        return self._said

    def recheck_step(self, verdict: ExactnessVerdict) -> None:
        """Compare this step with its repetition from the same state.

        Args:
            verdict: verdict that this step differs from the record.
        """
        assert self._row is not None  # noqa: S101  # for the type checker
        self._expected = _ResumedSnapshot(verdict.step, {self._row.step: self._row}, True, verdict.why, doubted=verdict)

    def stop_comparison(self, why: str) -> ExactnessVerdict | None:
        """Stop recording and comparing the steps under way.

        Args:
            why: the reason.

        Returns:
            The verdict on a resume whose steps were being compared.
        """
        expected = self._expected
        self._owned, self._expected = None, None
        self.losses.stop_loss_comparison()
        self._targets.clear()
        if expected is None:
            return None
        if expected.doubted is not None:
            return replace(expected.doubted, repeats=True)
        if expected.repeated:
            return self._build_repeat_verdict(expected)
        return ExactnessVerdict(verdict="not-confirmed", step=expected.step, steps=0, why=(why,))

    def _find_owned_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters whose pieces are counted on this worker; each piece is counted on one worker.

        The first call is collective.
        """
        if self._owned is None:
            names = name_parameters(self._model, self._optimizer)
            names = {parameter: name for parameter, name in names.items() if parameter.requires_grad}
            parameters = {name: parameter.detach() for parameter, name in names.items()}
            mine = PieceAssignment(self._worker, lambda _: False).select_own_pieces(
                extract_local_pieces({"parameters": parameters})
            )
            self._owned = {name: parameter for parameter, name in names.items() if name in mine.get("parameters", {})}
        return self._owned

    def take_gradient(self, number: int, loss: torch.Tensor | None) -> None:
        """Sum the gradients of a step before they are clipped, and store this worker's loss."""
        began_s = time.perf_counter()
        owned = self._owned or {}
        gradients = {name: tensor.grad for name, tensor in owned.items() if tensor.grad is not None}
        self._gradient = number, _sum_if_possible(gradients)
        self._loss = number, None if loss is None else _sum_if_possible({"loss": loss})
        self._spent_s += time.perf_counter() - began_s

    def take_update(self, number: int) -> None:
        """Sum the parameters after a step."""
        began_s = time.perf_counter()
        self._update = number, _sum_if_possible(self._owned or {})
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
        taken = [
            held[1] if held is not None and held[0] == step else None
            for held in (self._loss, self._gradient, self._update)
        ]
        self.losses.flush()
        reports = gathered_json([*taken, self.losses.differs], self._worker)
        row = None
        if all(None not in report[1:3] for report in reports):
            sums = [sum(report[i] for report in reports) % MODULUS for i in (1, 2)]
            row = StepBits(step=step, losses=tuple(report[0] for report in reports), gradient=sums[0], update=sums[1])
        self._row = row
        for target in self._targets:
            if row is not None and step == target.step + len(target.rows) + 1:
                target.rows.append(row)
                target.saver.annotate(target.step, FILE, to_text(target.rows))
        self._targets = [target for target in self._targets if step < target.step + STEPS]
        verdict = (
            self._compare_repeated_step(row) if self._expected is not None and step in self._expected.rows else None
        )
        if verdict is not None:
            self._expected, self._said = None, verdict
        elif self._expected is None:
            verdict = self.losses.add_loss_result(step, [report[3] for report in reports], self._said)
        if verdict is not None:
            self.losses.join_origin(is_same=verdict.differs is None)
            if verdict.differs is not None:
                self.losses.stop_loss_comparison()
        return verdict

    def _compare_repeated_step(self, row: StepBits | None) -> ExactnessVerdict | None:
        expected = self._expected
        assert expected is not None  # noqa: S101  # for the type checker
        if row is None:  # a worker that received this step from a peer has no sums of it
            return self.stop_comparison(f"a worker was replaced in step {expected.step + 1}")
        differs = row.compare(expected.rows[row.step], losses=expected.losses)
        if expected.doubted is not None:
            return replace(expected.doubted, repeats=differs not in ("loss", "gradient"))
        if differs is not None:
            return ExactnessVerdict(
                verdict="not-exact", step=expected.step, steps=expected.repeated, differs=differs, at=row.step,
                why=expected.known, has_losses=expected.losses,
            )  # fmt: skip
        expected.repeated += 1
        return self._build_repeat_verdict(expected) if expected.repeated == len(expected.rows) else None

    def _build_repeat_verdict(self, expected: _ResumedSnapshot) -> ExactnessVerdict:
        return ExactnessVerdict(
            verdict="not-confirmed" if expected.known else "exact", step=expected.step, steps=expected.repeated,
            why=expected.known,
        )  # fmt: skip


def _sum_if_possible(tensors: Mapping[str, torch.Tensor]) -> int | None:
    """Return the sum; None for tensors of a class without plain numbers, which must not end the run."""
    try:
        return sum_tensors(tensors)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None


def to_text(rows: Sequence[StepBits]) -> str:
    """Return the text of the file next to a snapshot: the steps, and a digest of them."""
    steps = [row.document() for row in rows]
    return json.dumps({"steps": steps, "digest": _compute_steps_digest(steps)}, indent=1) + "\n"


def from_text(text: str) -> list[StepBits]:
    """Return the steps in a text of `to_text`; empty if it is damaged, or is something else."""
    try:
        document = json.loads(text)
        steps = document["steps"]
        return (
            [StepBits.from_document(row) for row in steps] if document["digest"] == _compute_steps_digest(steps) else []
        )
    except (LookupError, TypeError, ValueError, RecursionError):
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
    texts = gathered_json(_read_text(path / FILE) if looks else None, worker)
    best: list[StepBits] = []
    for text in texts:
        rows = from_text(text or "")
        best = rows if len(rows) > len(best) else best
    return best


def _read_text(path: Place) -> str | None:
    try:
        return path.read_text() if size_bytes(path) <= MAX_BYTES else None
    except (OSError, ValueError, SnapshotError):  # there is no record, or it is not text
        return None
