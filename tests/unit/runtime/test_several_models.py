"""Loops with several models in a session: the weights of one process, and the bits of a calm run after a kill."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from dtctl import names
from dtctl.errors import PlanError
from dtctl.runtime import session
from dtctl.runtime.own_loop.several_models import join_optimizers
from tests import forked
from tests.facts import raises

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
EXAMPLE = Path(__file__).parents[3] / "examples/several_models.py"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a process trains without a launcher."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    for name in (names.SNAPSHOT_DIR, names.METRICS, names.TRAIN_CONFIG, names.RUN_DIR, names.WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def train(folder: Path, kind: str, workers: int, *options: str) -> forked.Ended:
    folder.mkdir(exist_ok=True)
    return forked.launch([EXAMPLE, kind, *options], workers, cwd=folder, environ=ALONE if workers == 1 else {})


def weights(ended: forked.Ended) -> str:
    assert ended.code == 0, ended.output
    found = re.search(r"weights (\S+)", ended.output)
    assert found is not None, ended.output
    return found[1]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gan", "actor", "byol", "reference"])
def test_the_example_gives_the_weights_of_one_process(tmp_path: Path, kind: str) -> None:
    alone = float(weights(train(tmp_path / "one", kind, 1)))
    for options in ((), ("--fsdp",)):
        folder = tmp_path / f"two{len(options)}"
        calm = weights(train(folder, kind, 2, *options))
        assert float(calm) == pytest.approx(alone, rel=1e-9)
        for step in sorted((folder / "snapshots").glob("step-*"))[1:]:  # as if it had been killed since
            step.rename(tmp_path / f"{len(options)}-{step.name}")
        again = train(folder, kind, 2, *options)
        assert "repeated bit for bit" in again.output
        assert weights(again) == calm


@pytest.mark.torch
def test_a_parameter_has_one_optimizer() -> None:
    model = nn.Linear(2, 1)
    with raises(PlanError, "optimizers parameter"):
        join_optimizers({"one": torch.optim.SGD(model.parameters()), "two": torch.optim.SGD(model.parameters())})


@pytest.mark.torch
def test_steps_that_need_an_argument_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score for a schedule, and a closure for an optimizer, which a loop of one's own may call itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DTCTL_SNAPSHOT_DIR", str(tmp_path / "snapshots"))
    model = nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(PlanError, "ReduceLROnPlateau.step score extra_state"):
        session(model, plain, schedule=torch.optim.lr_scheduler.ReduceLROnPlateau(plain))
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 2)) - 1).square().mean()
        loss.backward()
        return loss

    with session(model, optimizer) as s:
        while s.steps_done < 3:
            s.end_step(optimizer.step(closure))
    assert closure() < 1e-6
    with raises(SystemExit, "4"), session(model, optimizer) as s:
        s.step(model(torch.ones(4, 2)).square().mean())


@pytest.mark.torch
def test_several_optimizers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own kind, groups and state; another kind than before is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DTCTL_SNAPSHOT_DIR", str(tmp_path / "snapshots"))

    def run(steps: int, second: type[torch.optim.Optimizer] = torch.optim.SGD) -> list[torch.Tensor]:
        torch.manual_seed(0)
        models = {"maker": nn.Linear(3, 2), "critic": nn.Linear(2, 1)}
        more = {"momentum": 0.9} if second is torch.optim.SGD else {}
        optimizers = {
            "maker": torch.optim.Adam(models["maker"].parameters()),
            "critic": second(models["critic"].parameters(), lr=0.1, **more),  # type: ignore[call-arg]
        }
        with session(models, optimizers, every_steps=1) as s:
            while s.steps_done < steps:
                inputs = torch.ones(4, 3) * s.steps_done
                s.step(models["critic"](models["maker"](inputs)).square().mean())
        return [parameter for model in models.values() for parameter in model.parameters()]

    straight = run(6)
    for path in (tmp_path / "snapshots").iterdir():
        path.rename(tmp_path / path.name) if path.name.startswith("step-") else None
    run(3)
    assert all(map(torch.equal, straight, run(6)))
    with raises(SystemExit, "10"):
        run(8, torch.optim.RMSprop)


@pytest.mark.torch
@pytest.mark.parametrize("clip", [None, 0.5])
def test_metrics_have_the_gradients_and_rates_of_each_optimizer(alone: Path, clip: float | None) -> None:
    models = {"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)}
    steps = {"a": torch.optim.SGD(models["a"].parameters(), 0.1), "b": torch.optim.SGD(models["b"].parameters(), 0.2)}
    with session(models, steps, clip=clip, log_every=1) as s:
        for name, scale in (("a", 3.0), ("b", 4.0)):
            s.backward(models[name](torch.tensor([[scale, 0.0]])).sum())
            s.update(name)
        s.end_step(torch.tensor(1.0))
    row = json.loads((alone / "metrics.jsonl").read_text())
    wanted = {"lr_a": 0.1, "lr_b": 0.2, "grad_norm": 5.0, "grad_norm_a": 3.0, "grad_norm_b": 4.0}
    assert {key: row[key] for key in wanted} == pytest.approx(wanted)
    assert "samples_per_s" not in row, "a session without a loader does not know it"


@pytest.mark.torch
def test_what_a_loop_does_itself_is_left_out_of_metrics(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with session(model, optimizer, log_every=1) as s:
        loss = model(torch.ones(4, 2)).mean()
        loss.backward()
        optimizer.step()
        s.end_step(loss)
    row = json.loads((alone / "metrics.jsonl").read_text())
    assert not {"grad_norm", "samples_per_s"} & row.keys()
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step"))
    assert "grad" not in line
    assert "samples" not in line
