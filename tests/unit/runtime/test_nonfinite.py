"""Gradients that are not finite: stop, skip, go back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import WorkerFailed
from dtctl.runtime import Trainer, Worker
from dtctl.runtime.guards.nonfinite import MAX_ROLLBACKS, MAX_SKIPPED, NonFiniteGuard
from dtctl.runtime.precision import LossScale
from dtctl.runtime.snapshot import read
from dtctl.runtime.snapshot.format import layout
from tests.facts import missing, raises
from tests.unit.runtime.conftest import Make, squared

GOOD, BAD = torch.tensor(1.0), torch.tensor(math.nan)


def poisoned(*calls: int) -> Callable[[nn.Module, Any], torch.Tensor]:
    count = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        value = squared(model, batch)
        return value * math.nan if count in calls else value

    return loss


def linear(**parts: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": nn.Linear(8, 1), **parts}


def finite(trainer: Trainer) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def test_an_overflow_that_the_scale_explains_is_skipped_and_is_no_case_for_the_policy(worker: Worker) -> None:
    guard = NonFiniteGuard("stop", LossScale(4.0), worker)
    assert [guard.decide_step_action(step, BAD) for step in (1, 2)] == ["skip", "skip"]
    with raises(WorkerFailed, "gradient step 3 finite"):
        guard.decide_step_action(3, BAD)


def test_skipping_without_end_ends(worker: Worker) -> None:
    guard = NonFiniteGuard("skip", None, worker)
    assert guard.decide_step_action(1, BAD) == "skip"
    assert guard.decide_step_action(2, GOOD) == "take"
    for step in range(MAX_SKIPPED):
        assert guard.decide_step_action(3 + step, BAD) == "skip"
    with raises(WorkerFailed, "100 row"):
        guard.decide_step_action(200, BAD)
    assert guard.skipped == MAX_SKIPPED + 2


def test_going_back_helps_or_ends(worker: Worker) -> None:
    guard = NonFiniteGuard("rollback", None, worker)
    for _ in range(MAX_ROLLBACKS):
        assert guard.decide_step_action(10, BAD) == "rollback"
        assert guard.decide_step_action(8, GOOD) == "take"
    assert guard.decide_step_action(11, GOOD) == "take"
    for _ in range(MAX_ROLLBACKS):
        assert guard.decide_step_action(12, BAD) == "rollback"
    with raises(WorkerFailed, "3"):
        guard.decide_step_action(9, BAD)


def test_stop_leaves_no_spoilt_snapshot(make: Make, tmp_path: Path) -> None:
    settings = {"snapshot": {"every_steps": 2, "keep": 9}, "log_every": 100}
    with raises(WorkerFailed, "gradient step 5 loss"):
        make(settings, **linear(loss=poisoned(5))).run()
    assert [step for step, _ in layout.list_step_folders(tmp_path / "snapshots")] == [4, 2]


class Root(torch.autograd.Function):
    """The identity, whose gradient is not a number: what `sqrt` does at zero."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.nan


def rooted(call: int) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A loss whose gradient with regard to the first layer's bias alone is not finite in one call."""
    count = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        value = squared(model, batch)
        bias: torch.Tensor = model[0].bias  # type: ignore[index,union-attr]
        return value + 0 * Root.apply(bias).sum() if count == call else value

    return loss


@pytest.mark.parametrize("clip", [None, 1.0])
def test_what_comes_up_in_the_backward_pass_is_told_with_its_parameters(make: Make, clip: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    message = (
        r"^the gradient of step 3 is not finite: the loss was finite, so it appeared in the backward pass; "
        r"not finite: 0\.bias$"
    )
    with pytest.raises(WorkerFailed, match=message):
        make({"log_every": 1, "clip_norm": clip}, model=model, loss=rooted(3)).run()


def test_the_step_is_that_of_the_first_norm_where_norms_are_there_anyway(make: Make) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    with raises(WorkerFailed, "3"):
        make({"log_every": 10, "clip_norm": 1.0}, model=model, loss=rooted(3)).run()


def test_what_cannot_be_known_is_said_and_the_next_attempt_finds_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTCTL_RUN_DIR", str(tmp_path))
    torch.manual_seed(0)
    doubt = (
        "^the gradient of step 4 is not finite: the loss of step 4 is the first that is not; the gradient of step 3, "
        "which was not checked, may have corrupted the weights before; if the run is started again, the "
        "parameters are named$"
    )
    layers = nn.Linear(8, 4), nn.Linear(4, 1)
    with pytest.raises(WorkerFailed, match=doubt):
        make({"log_every": 10, "snapshot": {"every_steps": 100}}, model=nn.Sequential(*layers), loss=rooted(3)).run()
    monkeypatch.setenv("DTCTL_ATTEMPT", "1")
    layers = nn.Linear(8, 4), nn.Linear(4, 1)
    trainer = make({"log_every": 10}, model=nn.Sequential(*layers), loss=rooted(3))
    with raises(WorkerFailed, "3 0.bias"):
        trainer.run()
    trainer.training.engine.guard.record_step_loss(11, GOOD)
    assert not trainer.training.engine.guard.must_check_step, "it looks no longer than it has to"


def test_skip_leaves_weights_and_moments_as_they_were(make: Make) -> None:
    ends = []
    for folder, calls in (("a", ()), ("b", (3, 4))):
        settings = {"on_nan": "skip", "steps": 2 + len(calls), "schedule": "constant", "snapshot": {"dir": folder}}
        trainer = make(settings, **linear(loss=poisoned(*calls)))
        trainer.run()
        ends.append(trainer.model.state_dict())
        assert trainer.training.engine.guard.skipped == len(calls)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_going_back_leaves_samples_out_and_lines_stand_once(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"on_nan": "rollback", "log_every": 1, "snapshot": {"every_steps": 4}}
    trainer = make(settings, **linear(loss=poisoned(7)))
    trainer.run()
    assert finite(trainer)
    assert (trainer.step, trainer.training.position.samples) == (12, 15 * 4)
    assert not missing(capsys.readouterr().out, "gradient step 7 back step 4 12 samples")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    good, _ = read.find_newest_good(tmp_path / "snapshots")
    assert good is not None
    assert good.manifest is not None
    assert good.manifest.facts["position"] == 60


def test_by_epochs_samples_left_out_are_not_made_up_for(make: Make) -> None:
    settings = {"on_nan": "rollback", "steps": None, "epochs": 1, "snapshot": {"every_steps": 4}}
    trainer = make(settings, **linear(loss=poisoned(7)))
    trainer.run()
    assert (trainer.step, trainer.training.position.samples) == (10, 50)


def test_without_a_snapshot_there_is_no_way_back(make: Make) -> None:
    with raises(WorkerFailed, "snapshot back"):
        make({"on_nan": "rollback"}, **linear(loss=poisoned(1))).run()
