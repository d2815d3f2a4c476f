"""Sinks of metrics besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, each imported only if configured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dtctl import names
from dtctl.errors import PlanError


class MetricsSink(Protocol):
    """Destination of metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store the values of a step."""

    def close(self) -> None:
        """Write values that are not written yet."""


class TensorBoard:
    """Event files in a folder, from which a resume removes later steps."""

    def __init__(self, folder: Path, *, step: int) -> None:
        board = _import_sink_module("torch.utils.tensorboard", package="tensorboard", what="TensorBoard")
        self._writer = board.SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store the values of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write values that are not written yet."""
        self._writer.close()


class WandB:
    """Run of Weights & Biases with the run's id, so that all attempts are one run; WANDB_MODE and the like apply."""

    def __init__(self, project: str, settings: Mapping[str, Any]) -> None:
        wandb = _import_sink_module("wandb", package="wandb", what="Weights & Biases")
        run = os.environ.get(names.RUN_ID)
        self._run = wandb.init(project=project, id=run, name=run, resume="allow", config=dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write values that are not written yet."""
        self._run.finish()


class MlFlow:
    """Run in an MLflow experiment, identified by the run's id; MLFLOW_TRACKING_URI sets the server."""

    def __init__(self, experiment: str, settings: Mapping[str, Any]) -> None:
        self._mlflow = _import_sink_module("mlflow", package="mlflow-skinny", what="MLflow")
        self._mlflow.set_experiment(experiment)
        run, tag = os.environ.get(names.RUN_ID), names.RUN_ID
        earlier = self._mlflow.search_runs(filter_string=f"tags.{tag} = '{run}'", output_format="list") if run else []
        if earlier:
            self._mlflow.start_run(run_id=earlier[0].info.run_id)
        else:
            self._mlflow.start_run(run_name=run, tags={tag: run} if run else None)
            self._mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store the values of a step."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """Write values that are not written yet."""
        self._mlflow.end_run()


def _import_sink_module(module: str, *, package: str, what: str) -> Any:
    try:
        return import_module(module)
    except ImportError as exc:
        raise PlanError(f"{what} is requested, but not installed", hint=f"pip install {package}") from exc
