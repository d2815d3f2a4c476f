"""The record of the steps after a snapshot confirms a resume that repeats them, and names what differs first."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtctl import names
from dtctl.errors import SnapshotError
from dtctl.runtime import Outcome, TensorData, Trainer
from dtctl.runtime.exactness.losses import FILE as LOSSES
from dtctl.runtime.exactness.record import FILE, format_step_bits, parse_step_bits
from dtctl.runtime.snapshot.format import layout
from tests.facts import missing, raises
from tests.unit.runtime.conftest import Make, network, points, squared
from tests.verdicts import read_verdict

pytestmark = pytest.mark.torch

HALF, WHOLE = 6, 12
SETTINGS: dict[str, Any] = {
    "schedule": "constant", "lr": 0.05, "log_every": 1, "steps": WHOLE, "snapshot": {"every_steps": HALF, "keep": 9},
}  # fmt: skip


def begin(make: Make, settings: dict[str, Any] | None = None, **parts: Any) -> Trainer:
    """Train to the end, and leave the snapshot of the half alone, as if the run had been killed."""
    trainer = make({**SETTINGS, **(settings or {})}, **parts)
    trainer.run()
    shutil.rmtree(layout.build_snapshot_path(Path("snapshots"), WHOLE))
    return trainer


def record(step: int = HALF) -> Path:
    return Path(layout.build_snapshot_path(Path("snapshots"), step)) / FILE


def scaled(factor: float) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A loss that hides from every list: it asks an object that nobody looks into."""
    values = (factor,)
    return lambda model, batch: squared(model, batch) * next(iter(values), 1.0)


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is another."""

    factor = 1.0

    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_context: Any, *gradients: Any) -> Any:
        return gradients[0] * Scaled.factor


def with_scaled_gradient(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(Scaled.apply(model(inputs)), targets)


class Forgetful(nn.Linear):
    """Leaves its bias as it is when it is told to load one."""

    forgets = False

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        if self.forgets:
            state[f"{prefix}bias"] = self.bias.detach()
        super()._load_from_state_dict(state, prefix, *more)


def test_two_steps_are_recorded_and_repeated(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    straight = begin(make)
    rows = json.loads(record().read_text())["steps"]
    assert [row["step"] for row in rows] == [7, 8]
    assert all(len(row["losses"]) == 1 and int(row["gradient"], 16) and int(row["update"], 16) for row in rows)
    capsys.readouterr()
    again = make(SETTINGS)
    again.run()
    out = capsys.readouterr().out
    assert f"resumed at step {HALF} of {WHOLE}: nothing known differs\n" in out
    assert "exact: steps 7 to 8 repeated bit for bit\n" in out
    assert all(torch.equal(a, b) for a, b in zip(straight.model.parameters(), again.model.parameters(), strict=True))


class Killed(Exception):
    """What ends a training in the midst of a step."""


def counting(steps: Iterator[int], *, more_from: int = WHOLE, until: int = WHOLE) -> Callable[[nn.Module, Any], Any]:
    """A loss that counts its steps where nobody looks: from one on it is another, and after the last it fails."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        step = next(steps)
        if step > until:
            raise Killed
        return squared(model, batch) * (2.0 if step >= more_from else 1.0)

    return loss


@pytest.mark.parametrize("more_from", [WHOLE, 10])
def test_losses_are_compared_up_to_the_kill(more_from: int, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Killed):
        make(SETTINGS, loss=counting(itertools.count(1), more_from=more_from, until=11)).run()
    capsys.readouterr()
    make(SETTINGS, loss=counting(itertools.count(1), more_from=more_from)).run()
    out = capsys.readouterr().out
    assert "exact: steps 7 to 8 repeated bit for bit\n" in out
    if more_from == WHOLE:
        assert "exact: steps 7 to 8 repeated bit for bit, and the losses up to step 11 are unchanged\n" in out
    else:
        assert (
            "not exact: steps 7 to 8 repeated bit for bit, and the loss of step 10 differs (usually a schedule" in out
        )
    assert not list(Path("snapshots").glob(LOSSES.format("*"))), "nothing is left after the end"


def test_a_late_difference_ends_a_run_that_has_to_be_exact(make: Make) -> None:
    with pytest.raises(Killed):
        make(SETTINGS, loss=counting(itertools.count(1), more_from=10, until=11)).run()
    settings = {**SETTINGS, "require_exact": True}
    with raises(SnapshotError, "loss step 10 differs snapshots after 6 train.require_exact"):
        make(settings, loss=counting(itertools.count(1), more_from=10)).run()


def test_losses_of_another_training_are_not_compared(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that an older attempt has left on this node: the snapshot is of a training that began later."""
    with pytest.raises(Killed):
        make(SETTINGS, loss=counting(itertools.count(1), until=11)).run()
    kept = Path("snapshots", LOSSES.format(0))
    old = kept.read_bytes()
    shutil.rmtree("snapshots")
    other = {**SETTINGS, "seed": 7}
    with pytest.raises(Killed):
        make(other, loss=counting(itertools.count(1), until=11)).run()
    kept.write_bytes(old)
    capsys.readouterr()
    make(other, loss=counting(itertools.count(1))).run()
    out = capsys.readouterr().out
    assert "exact: steps 7 to 8 repeated bit for bit\n" in out
    assert "not exact" not in out
    assert "losses up to" not in out


def test_losses_of_an_attempt_that_differed_do_not_count(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Killed):
        make(SETTINGS, loss=counting(itertools.count(1), until=9)).run()
    with pytest.raises(Killed):
        make({**SETTINGS, "lr": 0.04}, loss=counting(itertools.count(1), until=4)).run()
    capsys.readouterr()
    make(SETTINGS, loss=counting(itertools.count(1))).run()
    assert read_verdict(capsys.readouterr().out) == "exact"


def test_losses_are_in_the_memory_of_a_run_that_has_some(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(names.MEMORY_DIR, str(tmp_path / "memory"))
    with pytest.raises(Killed):
        make(SETTINGS, loss=counting(itertools.count(1), until=11)).run()
    assert [path.name for path in (tmp_path / "memory").iterdir()] == [LOSSES.format(0)]
    assert not list(Path("snapshots").glob(".losses*"))
    capsys.readouterr()
    make(SETTINGS, loss=counting(itertools.count(1))).run()
    assert "and the losses up to step 11 are unchanged\n" in capsys.readouterr().out


def test_a_second_kill_leaves_what_was_recorded(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    for until in (11, 4):  # after step 11, and after step 10 of the second attempt
        with pytest.raises(Killed):
            make(SETTINGS, loss=counting(itertools.count(1), until=until)).run()
    capsys.readouterr()
    make(SETTINGS, loss=counting(itertools.count(1))).run()
    assert "and the losses up to step 10 are unchanged\n" in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("more", [{}, {"accumulate": 3}, {"ema": {"decay": 0.9}}, {"clip_norm": 0.1}], ids=str)
def test_other_ways_to_train(
    precision: str, more: dict[str, Any], make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(make, {"precision": precision, **more})
    capsys.readouterr()
    make({**SETTINGS, "precision": precision, **more}).run()
    assert read_verdict(capsys.readouterr().out) == "exact"


def test_what_differs_first_is_named(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of these is in a list of what to compare."""

    def go_on(settings: dict[str, Any] | None = None, **parts: Any) -> str:
        for number, path in layout.list_step_folders(Path("snapshots")):
            if number > HALF:
                shutil.rmtree(path)
        make({**SETTINGS, **(settings or {})}, **parts).run()
        return read_verdict(capsys.readouterr().out)

    model = lambda: nn.Sequential(Forgetful(8, 4), nn.Linear(4, 1))  # noqa: E731
    begin(make, model=model(), loss=with_scaled_gradient)
    assert go_on(model=model(), loss=with_scaled_gradient) == "exact"

    monkeypatch.setattr(Scaled, "factor", 1.0 + 1e-3)
    text = go_on(model=model(), loss=with_scaled_gradient)
    assert text.startswith("not exact: the gradient of step 7 differs, its loss is equal"), text
    monkeypatch.setattr(Scaled, "factor", 1.0)

    monkeypatch.setattr(Forgetful, "forgets", True)
    text = go_on(model=model(), loss=with_scaled_gradient)
    assert text.startswith("not exact: the state that was loaded differs from the one that was saved"), text
    monkeypatch.setattr(Forgetful, "forgets", False)

    text = go_on({"weight_decay": 0.1}, model=model(), loss=with_scaled_gradient)
    assert text.startswith("not exact: the update of step 7 differs, its gradient is equal"), text
    assert "weight_decay changed from 0.0 to 0.1" in text.partition("known to differ: ")[2]

    data = points()
    inputs, targets = data.tensors[0].clone(), data.tensors[1]
    changed = next(i for i in read_order(make) if i not in (0, len(inputs) - 1))
    inputs[changed] += 1e-3
    text = go_on(model=model(), loss=with_scaled_gradient, samples=TensorData(inputs, targets))
    assert text.startswith("not exact: the loss of step 7 differs ("), text


class Unsteady:
    """A factor that is another one each time."""

    def __rmul__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 + int.from_bytes(os.urandom(2), "little") / 1e6)


def test_a_step_that_never_repeats_is_told_from_one_that_is_another(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As kernels of a GPU that add up in another order each time."""

    def go_on() -> str:
        begin(make, loss=with_scaled_gradient)
        capsys.readouterr()
        trainer = make(SETTINGS, loss=with_scaled_gradient)
        trainer.run()
        assert trainer.step == WHOLE
        rows = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert rows == sorted(set(rows)), rows
        return read_verdict(capsys.readouterr().out)

    monkeypatch.setattr(Scaled, "factor", Unsteady())
    text = go_on()
    assert text.startswith("not exact: the gradient of step 7 differs"), text
    assert "(its value differs at each computation here" in text
    shutil.rmtree("snapshots")
    (tmp_path / "metrics.jsonl").unlink()
    monkeypatch.setattr(Scaled, "factor", 1.0)
    assert go_on() == "exact"


def read_order(make: Make) -> list[int]:
    """Samples of step 7."""
    trainer = make(SETTINGS)
    position = HALF * trainer.training.position.batch.total
    return [int(index) for indices in trainer.training.position.schedule(position) for index in indices]


def test_a_known_difference_that_changes_no_bit(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    begin(make)
    capsys.readouterr()
    make({**SETTINGS, "steps": WHOLE + 2, "require_exact": True}).run()
    text = read_verdict(capsys.readouterr().out)
    assert text == "not confirmed: steps 7 to 8 repeated bit for bit, and yet steps changed from 12 to 14"


@pytest.mark.parametrize("content", [None, "", "{", '{"steps": [{"step": "x"}]}', "[]", '{"steps": 3}'])
def test_a_record_that_is_not_there_confirms_nothing(
    content: str | None, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(make)
    if content is None:
        record().unlink()
    else:
        record().write_text(content)
    capsys.readouterr()
    make({**SETTINGS, "require_exact": True}).run()
    assert read_verdict(capsys.readouterr().out).startswith("not confirmed: step 7 was not recorded before")


def test_a_record_that_was_damaged_says_nothing(make: Make) -> None:
    """A bit of it must not make an exact resume another one."""
    begin(make)
    whole, source = record().read_bytes(), random.Random(2)
    for _ in range(300):
        changed = bytearray(whole)
        changed[source.randrange(len(whole))] ^= 1 << source.randrange(8)
        assert parse_step_bits(bytes(changed).decode(errors="replace")) in ([], parse_step_bits(whole.decode()))


def test_half_a_record_confirms_one_step(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    begin(make)
    record().write_text(format_step_bits(parse_step_bits(record().read_text())[:1]))
    capsys.readouterr()
    make(SETTINGS).run()
    assert "exact: step 7 repeated bit for bit\n" in capsys.readouterr().out


@pytest.mark.parametrize("field", ["losses", "gradient", "update"])
def test_one_bit_is_enough(field: str, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    begin(make)
    first, second = parse_step_bits(record().read_text())
    held = getattr(second, field)
    changed = tuple(bits ^ 1 for bits in held) if field == "losses" else held ^ 1
    record().write_text(format_step_bits([first, replace(second, **{field: changed})]))
    capsys.readouterr()
    make(SETTINGS).run()
    assert read_verdict(capsys.readouterr().out).startswith(
        f"not exact: the {'loss' if field == 'losses' else field} of step 8 differs"
    )


def test_nothing_is_kept_before_the_verdict(make: Make, tmp_path: Path) -> None:
    begin(make)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    losses = LOSSES.format(0)
    with raises(SnapshotError, "step 6 gradient 7 require_exact") as caught:
        make(
            {**SETTINGS, "require_exact": True, "snapshot": {"every_steps": 1, "keep": 9}},
            optimizer=hook_gradients,
        ).run()
    assert caught.value.exit_code == 10
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != losses}
    assert after == before


def hook_gradients(model: nn.Module) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 1.001)
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)


def test_what_was_held_back_is_kept_after_the_verdict(make: Make, tmp_path: Path) -> None:
    begin(make)
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    make({**SETTINGS, "require_exact": True}).run()
    again = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["loss"] for row in again] == [json.loads(row)["loss"] for row in rows]
    assert [step for step, _ in layout.list_step_folders(Path("snapshots"))] == [WHOLE, HALF]


def test_a_stop_takes_two_more_steps_for_the_record(
    make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return squared(model, batch)

    trainer = make({**SETTINGS, "snapshot": {"every_steps": 100}}, loss=loss)
    assert trainer.run() is Outcome.STOPPED
    assert trainer.step == 5
    assert not missing(capsys.readouterr().out, "stopped 5 12")
    assert [row["step"] for row in json.loads(record(5).read_text())["steps"]] == [6, 7]
    logged = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert logged == [1, 2, 3, 4, 5]
    again = make({**SETTINGS, "snapshot": {"every_steps": 100}}, loss=loss)
    assert again.run() is Outcome.FINISHED
    assert "exact: steps 6 to 7 repeated bit for bit" in capsys.readouterr().out


def test_a_stop_with_little_grace_takes_no_more_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.1)
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return squared(model, batch)

    monkeypatch.setenv(names.GRACE_S, "0.5")
    trainer = make({**SETTINGS, "snapshot": {"every_steps": 100}}, loss=loss)
    assert trainer.run() is Outcome.STOPPED
    assert not record(3).exists()


def test_a_stop_before_the_verdict_keeps_nothing(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    begin(make)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if trainer.step == HALF:
            os.kill(os.getpid(), signal.SIGTERM)
        return squared(model, batch)

    capsys.readouterr()
    trainer = make({**SETTINGS, "require_exact": True}, loss=loss)
    assert trainer.run() is Outcome.STOPPED
    assert not missing(capsys.readouterr().out, "stopped 7 12 without snapshot exact")
    assert [step for step, _ in layout.list_step_folders(Path("snapshots"))] == [HALF]


def test_snapshots_at_every_step_have_a_record_each(make: Make) -> None:
    make({**SETTINGS, "snapshot": {"every_steps": 1, "keep": 99}}, model=network()).run()
    found = {
        step: [row["step"] for row in json.loads(record(step).read_text())["steps"]] if record(step).exists() else []
        for step, _ in layout.list_step_folders(Path("snapshots"))
    }
    assert found == {step: [n for n in (step + 1, step + 2) if n <= WHOLE] for step in range(1, WHOLE + 1)}
