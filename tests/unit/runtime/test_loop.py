"""The loop in one process: resuming is exact, signals stop in good order, bad settings are refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import PlanError, SnapshotError, SpecError, WorkerFailed
from dtctl.runtime import Outcome, TensorData, Trainer
from dtctl.runtime.snapshot import read, state
from dtctl.runtime.snapshot.format import layout
from tests.facts import missing, raises
from tests.unit.runtime.conftest import Make, points, squared
from tests.verdicts import read_verdict


class Killed(Exception):
    """Stands for the end of the process, as far as the loop can tell."""


def dies_at(call: int) -> Callable[[nn.Module, Any], torch.Tensor]:
    calls = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        return squared(model, batch)

    return loss


def digest(trainer: Trainer) -> str:
    return state.compute_state_digest(
        trainer.model.state_dict(), state.optimizer_tree(trainer.model, trainer.optimizer)
    )


def steps_of(folder: Path) -> list[int]:
    return [step for step, _ in layout.list_step_folders(folder)]


def test_a_training_learns_and_logs(make: Make, tmp_path: Path) -> None:
    trainer = make({"steps": 200, "lr": 0.02, "log_every": 20}, model=nn.Linear(8, 1))
    assert trainer.run() is Outcome.FINISHED
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(20, 201, 20))
    assert rows[-1]["loss"] < rows[0]["loss"] / 10
    assert steps_of(tmp_path / "snapshots") == [200]


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 3, "clip_norm": 0.5}, {"optimizer": "sgd"}, {"precision": "bf16"}, {"precision": "fp16"}],
)
def test_a_killed_training_ends_with_the_same_bits(make: Make, tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {**settings, "snapshot": {"every_steps": 4, "dir": "straight"}}
    straight = make(settings)
    straight.run()
    settings["snapshot"]["dir"] = "killed"
    (tmp_path / "metrics.jsonl").rename(tmp_path / "straight.jsonl")
    with pytest.raises(Killed):
        make(settings, loss=dies_at(10 * settings.get("accumulate", 1))).run()
    assert steps_of(tmp_path / "killed") == [8, 4]
    resumed = make(settings)
    resumed.run()
    assert digest(resumed) == digest(straight)
    losses = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in map(json.loads, path.read_text().splitlines())]
        for path in (tmp_path / "straight.jsonl", tmp_path / "metrics.jsonl")
    ]
    assert losses[0] == losses[1]


def test_epochs_end_with_a_short_batch(make: Make, tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        seen.append(len(batch[0]))
        return squared(model, batch)

    trainer = make({"steps": None, "epochs": 2, "micro_batch": 8}, loss=loss, samples=points(25))
    trainer.run()
    assert trainer.steps == 7
    assert seen == [8, 8, 8, 8, 8, 8, 2]
    assert trainer.training.position.samples == 50


def test_short_last_micro_batches_weigh_by_sample(make: Make) -> None:
    model = nn.Linear(8, 1)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    settings = {
        "steps": None,
        "epochs": 1,
        "micro_batch": 4,
        "accumulate": 3,
        "optimizer": "sgd",
        "snapshot": {"dir": "a"},
    }
    make(settings, model=model, samples=points(9)).run()
    whole = nn.Linear(8, 1)
    whole.load_state_dict(start)
    settings |= {"micro_batch": 9, "accumulate": 1, "snapshot": {"dir": "b"}}
    make(settings, model=whole, samples=points(9)).run()
    assert torch.allclose(model.weight, whole.weight, atol=1e-7)


def test_a_signal_stops_with_a_snapshot(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return squared(model, batch)

    trainer = make(loss=loss)
    assert trainer.run() is Outcome.STOPPED
    assert steps_of(tmp_path / "snapshots") == [5]
    assert not missing(capsys.readouterr().out, "stopped 5 12")
    again = make(loss=loss)
    assert again.run() is Outcome.FINISHED
    assert read_verdict(capsys.readouterr().out) == "exact"


def test_a_damaged_snapshot_gives_way(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"snapshot": {"every_steps": 5, "keep": 5}}
    straight = make(settings)
    straight.run()
    path = tmp_path / "snapshots" / "step-00000012" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100] + b"x" * 100)
    capsys.readouterr()
    resumed = make(settings)
    resumed.run()
    out = capsys.readouterr().out
    assert "skipped: step-00000012 is corrupt: model.safetensors does not have the digest" in out
    assert "resumed at step 10 of 12: nothing known differs\nexact: steps 11 to 12 repeated bit for bit" in out
    assert digest(resumed) == digest(straight)
    assert read.verify_snapshot(path.parent).status == "ok"


def test_what_differs_is_said(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make({"seed": 1, "steps": 6}).run()
    make({"seed": 2, "steps": 8, "weight_decay": 0.1}).run()
    out = capsys.readouterr().out
    assert "resumed at step 6 of 8: known to differ: " in out
    for phrase in ("seed changed from 1 to 2", "steps changed from 6 to 8", "weight_decay changed from 0.0 to 0.1"):
        assert phrase in out


def test_settings_of_now_hold_after_a_resume(make: Make) -> None:
    make({"steps": 6}).run()
    trainer = make({"steps": 8, "weight_decay": 0.1})
    trainer.run()
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_finished_training_is_left_alone(make: Make, tmp_path: Path) -> None:
    make().run()
    written = (tmp_path / "snapshots" / "step-00000012" / "COMMIT").stat().st_mtime_ns
    assert make().run() is Outcome.FINISHED
    assert (tmp_path / "snapshots" / "step-00000012" / "COMMIT").stat().st_mtime_ns == written


def test_another_model_is_refused(make: Make) -> None:
    make().run()
    with raises(SnapshotError, "model"):
        make({"steps": 20}, model=nn.Sequential(nn.Linear(8, 1))).run()


def test_snapshots_by_the_clock(make: Make, tmp_path: Path) -> None:
    make({"snapshot": {"every_s": 1e-9, "keep": 99}}).run()
    assert len(steps_of(tmp_path / "snapshots")) == 12


def test_evaluation_is_logged(make: Make, tmp_path: Path) -> None:
    def score(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"error": (model(batch[0]) - batch[1]).square().mean(1)}

    make({"eval_every": 5, "log_every": 6}, validation=points(11), score=score).run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], "val_error" in row) for row in rows] == [(5, True), (6, False), (10, True), (12, True)]


def test_an_own_optimizer_keeps_the_ratio_of_its_rates(make: Make) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest, "lr": 0.1}])

    trainer = make({"lr": 1.0, "schedule": "constant"}, optimizer=optimizer)
    trainer.run()
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.5, 0.1]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"strategy": {"dp": 2, "tp": 2}}, PlanError, "dp tp 4 1 workers"),
        ({"snapshot": {"dir": "s3://who:what@bucket/run"}}, SpecError, "secrets"),
    ],
)
def test_what_is_not_there_is_refused(
    make: Make, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with raises(error, message):
        make(settings)


def test_no_samples(make: Make) -> None:
    with raises(PlanError, "samples"):
        make(samples=TensorData(torch.zeros(0, 8), torch.zeros(0, 1)))


def test_a_resume_that_is_not_exact_can_be_refused(make: Make) -> None:
    make({"seed": 1, "steps": 6}).run()
    with raises(SnapshotError, "step 6 seed 1 2"):
        make({"seed": 2, "steps": 8, "require_exact": True}).run()


def test_shards_are_refused_where_they_would_not_be_exact(make: Make) -> None:
    with raises(PlanError, "both set"):
        make({"exact": "elastic"})
    with raises(PlanError, "1 statistics"):
        make({"exact": "elastic", "global_batch": 8})


def test_a_group_that_is_added_in_training_is_refused_by_name(make: Make) -> None:
    late = nn.Parameter(torch.zeros(1))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if trainer.step == 1 and len(trainer.optimizer.param_groups) == groups:
            trainer.optimizer.add_param_group({"params": [late]})
        return squared(model, batch)

    trainer = make({"steps": 4}, loss=loss)
    groups = len(trainer.optimizer.param_groups)
    with pytest.raises(WorkerFailed) as caught:
        trainer.run()
    assert caught.value.where == "optimizer.add_param_group"
