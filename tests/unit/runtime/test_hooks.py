"""Hooks are called at their moments, end a training on all workers alike, and are part of its state."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime import Hook, Outcome, Trainer
from dtctl.runtime.hooks import HookRunner, TrainingView
from dtctl.runtime.snapshot.format import layout
from tests.facts import raises
from tests.unit.runtime.conftest import Make, points
from tests.unit.runtime.snapshot.gang import gang
from tests.verdicts import read_verdict

pytestmark = pytest.mark.torch

SETTINGS: dict[str, Any] = {
    "schedule": "constant", "lr": 0.05, "log_every": 1, "steps": 20, "eval_every": 2,
    "snapshot": {"every_steps": 4, "keep": 9},
}  # fmt: skip


class Patience(Hook):
    """Early stopping: the score has not fallen for some evaluations; it is halved at first."""

    def __init__(self, limit: float) -> None:
        self.limit, self.best, self.waited = limit, float("inf"), 0

    def after_evaluation(self, training: TrainingView, scores: Mapping[str, float]) -> None:
        score = scores["val_loss"] if training.step < 7 else self.limit
        self.waited = 0 if score < self.best else self.waited + 1
        self.best = min(self.best, score)
        if self.waited == 1:
            training.scale_rate(0.5)
        if self.waited == 3:
            training.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


def score(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    inputs, targets = batch
    return {"loss": (model(inputs) - targets).square().mean(-1)}


def with_hooks(make: Make, *hooks: Hook, settings: Mapping[str, Any] | None = None, **parts: Any) -> Trainer:
    return make(
        {**SETTINGS, **(settings or {})}, hooks=hooks, validation=points(), score=score, **parts
    )  # fmt: skip


class Moments(Hook):
    """Notes when it is called."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def after_step(self, training: TrainingView) -> None:
        self.seen.append(("step", training.step))

    def after_evaluation(self, training: TrainingView, scores: Mapping[str, float]) -> None:
        assert scores.keys() == {"val_loss"}
        self.seen.append(("evaluation", training.step))

    def after_snapshot(self, training: TrainingView) -> None:
        self.seen.append(("snapshot", training.step))


def test_hooks_are_called_in_order(make: Make) -> None:
    hook = Moments()
    with_hooks(make, hook, settings={"steps": 5}).run()
    assert hook.seen == [
        ("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("step", 4), ("evaluation", 4), ("snapshot", 4),
        ("step", 5), ("evaluation", 5), ("snapshot", 5),
    ]  # fmt: skip


def test_a_training_that_a_hook_ends_is_finished_and_exact_after_a_kill(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = with_hooks(make, Patience(1e9))
    assert calm.run() is Outcome.FINISHED
    assert 8 < calm.step < 20
    newest, *_ = layout.list_step_folders(Path("snapshots"))
    assert newest[0] == calm.step, "there is a snapshot of the end"

    again = with_hooks(make, Patience(1e9))
    assert again.run() is Outcome.FINISHED
    assert again.step == calm.step, "a run that was ended stays ended"

    for step, path in layout.list_step_folders(Path("snapshots")):
        if step > 8:
            shutil.rmtree(path)
    capsys.readouterr()
    killed = with_hooks(make, Patience(1e9))
    assert killed.run() is Outcome.FINISHED
    assert read_verdict(capsys.readouterr().out) == "exact"
    assert killed.step == calm.step
    assert killed.training.trained.rate.factor == calm.training.trained.rate.factor < 1
    assert all(
        torch.equal(one, other) for one, other in zip(calm.model.parameters(), killed.model.parameters(), strict=True)
    )


def test_a_decision_elsewhere_is_refused(make: Make) -> None:
    class Hasty(Hook):
        def after_step(self, training: TrainingView) -> None:
            training.stop()

    with raises(PlanError, "stop after_evaluation"):
        with_hooks(make, Hasty()).run()


class Teacher(nn.Module):
    """A student that learns from the data and from a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 1), nn.Linear(8, 1).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            learnt = self.teacher(inputs)
        output: torch.Tensor = self.student(inputs) + 0.5 * learnt
        return output


class Follow(Hook):
    changes_training = True

    def after_step(self, training: TrainingView) -> None:
        assert isinstance(training.model, Teacher)
        with torch.no_grad():
            pairs = zip(training.model.teacher.parameters(), training.model.student.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 0.2)


class StopAt(Hook):
    """Sends this process the signal by which the launcher requests a stop."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, training: TrainingView) -> None:
        if training.step == self.step:
            signal.raise_signal(signal.SIGTERM)


def teach(make: Make, *hooks: Hook, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    return with_hooks(make, *hooks, settings=settings, model=Teacher())


@pytest.mark.parametrize("require_exact", [False, True])
def test_a_teacher_that_a_hook_moves_is_exact_after_a_kill_and_after_a_stop(
    make: Make, capsys: pytest.CaptureFixture[str], require_exact: bool
) -> None:
    """The hook is part of each step that is recorded, and of each that is repeated."""
    calm = teach(make, Follow(), steps=12)
    calm.run()
    for step, path in layout.list_step_folders(Path("snapshots")):
        if step > 8:  # as if it had been killed since
            shutil.rmtree(path)
    killed = teach(make, Follow(), steps=12, require_exact=require_exact)
    assert killed.run() is Outcome.FINISHED
    assert read_verdict(capsys.readouterr().out) == "exact"
    shutil.rmtree("snapshots")
    assert teach(make, Follow(), StopAt(7), steps=12).run() is Outcome.STOPPED
    stopped = teach(make, Follow(), steps=12, require_exact=require_exact)
    assert stopped.run() is Outcome.FINISHED
    assert read_verdict(capsys.readouterr().out) == "exact"
    for run in (killed, stopped):
        assert all(
            torch.equal(one, other) for one, other in zip(calm.model.parameters(), run.model.parameters(), strict=True)
        )


def test_the_record_after_a_stop_ends_where_a_hook_may_decide(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps after an evaluation are not recorded: there was none, and the rate follows from its scores."""

    class Halving(Hook):
        def after_evaluation(self, training: TrainingView, scores: Mapping[str, float]) -> None:
            training.scale_rate(0.5)

    assert with_hooks(make, Halving(), StopAt(7), settings={"steps": 12}).run() is Outcome.STOPPED
    assert with_hooks(make, Halving(), settings={"steps": 12}).run() is Outcome.FINISHED
    output = capsys.readouterr().out
    assert read_verdict(output) == "exact", output


def test_calls_are_held_back_until_a_resume_is_known_to_be_exact(make: Make) -> None:
    with_hooks(make, settings={"steps": 8}).run()
    shutil.rmtree(layout.build_snapshot_path(Path("snapshots"), 8))
    hook = Moments()

    class Noting(Hook):
        def after_step(self, training: TrainingView) -> None:
            hook.seen.append((f"with {trainer.training.check.recorder.is_pending}", training.step))

    trainer = with_hooks(make, Noting(), settings={"steps": 8, "require_exact": True})
    trainer.run()
    assert hook.seen == [("with False", step) for step in (5, 6, 7, 8)]


def test_steps_for_the_record_alone_have_no_effect_of_hooks(make: Make) -> None:
    """Only hooks that change the training are called in the steps after a requested stop."""
    hook = Moments()
    assert with_hooks(make, hook, StopAt(7), settings={"steps": 12}).run() is Outcome.STOPPED
    assert [step for moment, step in hook.seen if moment == "step"] == [1, 2, 3, 4, 5, 6, 7]


def test_a_hook_that_changes_the_model_must_declare_it(make: Make) -> None:
    class Silent(Follow):
        changes_training = False

    with raises(PlanError, "hook Silent after_step changes_training"):
        teach(make, Silent(), steps=12).run()


def test_a_rate_that_the_program_sets_itself_is_refused(make: Make) -> None:
    """The Trainer sets it before each step, so that it would have no effect."""

    class Plateau(Hook):
        def after_evaluation(self, training: TrainingView, scores: Mapping[str, float]) -> None:
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(training.optimizer, factor=0.5)
            schedule._reduce_lr(0)  # type: ignore[attr-defined]

    with raises(PlanError, "learning rate 0.05 0.025 step 2 scale_rate"):
        with_hooks(make, Plateau()).run()


def test_several_optimizers_are_refused(make: Make) -> None:
    with raises(PlanError, "list optimizer muon session"):
        make(optimizer=lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)])


def test_an_optimizer_that_needs_a_closure_is_refused(make: Make) -> None:
    with raises(PlanError, "LBFGS.step closure session"):
        make(optimizer=lambda model: torch.optim.LBFGS(model.parameters()))


def test_the_verdict_of_a_resume_is_seen_and_in_the_metrics(make: Make) -> None:
    settings = {"steps": 8, "log_every": 1}
    with_hooks(make, settings=settings).run()
    shutil.rmtree(layout.build_snapshot_path(Path("snapshots"), 8))
    seen: list[str | None] = []

    class Seeing(Hook):
        def after_step(self, training: TrainingView) -> None:
            seen.append(training.verdict and training.verdict.verdict)

    with_hooks(make, Seeing(), settings=settings).run()
    assert seen == [None, "exact", "exact", "exact"], "steps 5 and 6 are repeated"
    rows = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    assert [row.get("resume_exact") for row in rows[-4:]] == [None, 1, 1, 1]


def test_workers_that_decide_differently_are_named(tmp_path: Path) -> None:
    class Own(Hook):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def after_evaluation(self, training: TrainingView, scores: Mapping[str, float]) -> None:
            if self.rank:
                training.stop()

    def action(worker: Any) -> None:
        view = TrainingView(4, 9, nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], lr=1.0))
        with raises(PlanError, "rank 0 1 stop False True step 4"):
            HookRunner([Own(worker.rank)], worker).call_evaluation_hooks(view, {"val_loss": 1.0})

    gang(2, tmp_path, action)
