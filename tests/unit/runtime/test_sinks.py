"""Metrics elsewhere; the packages are optional, and what is missing is said."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dtctl import names
from dtctl.errors import PlanError
from dtctl.runtime.telemetry.sinks import MlFlow, WandB
from tests.facts import raises
from tests.unit.runtime.conftest import Make

HAS_WANDB = importlib.util.find_spec("wandb") is not None
HAS_MLFLOW = importlib.util.find_spec("mlflow") is not None


@pytest.mark.parametrize("folder", ["board", None], ids=["of the run", "anywhere"])
def test_the_spec_asks_for_tensorboard(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None
) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv(names.RUN_DIR, str(tmp_path / "run"))
    make({"tensorboard": folder or str(tmp_path / "elsewhere"), "steps": 4, "log_every": 2}).run()
    written = reader.EventAccumulator(str(tmp_path / "run/board" if folder else tmp_path / "elsewhere"))
    written.Reload()
    assert [event.step for event in written.Scalars("loss")] == [2, 4]


@pytest.mark.skipif(HAS_WANDB, reason="wandb is installed")
def test_a_missing_package_is_named(make: Make) -> None:
    with raises(PlanError, "Weights Biases installed") as caught:
        make({"wandb": "project"}).run()
    assert caught.value.hint == "pip install wandb"


@pytest.mark.skipif(not HAS_WANDB, reason="needs wandb")
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_keeps_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv(names.RUN_ID, "run-7")
    sink = WandB("project", {"lr": 0.1})
    sink.log(10, {"loss": 1.5})
    sink.close()
    assert list(tmp_path.rglob("run-run-7.wandb"))


@pytest.mark.skipif(not HAS_MLFLOW, reason="needs mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv(names.RUN_ID, "run-7")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}")
    for step in (10, 20):
        sink = MlFlow("experiment", {"lr": 0.1})
        sink.log(step, {"loss": 1.0 / step})
        sink.close()
    (run,) = mlflow.search_runs(experiment_names=["experiment"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(10, 0.1), (20, 0.05)]
