"""Metrics and progress of a run: every worker measures, one exchange collects the figures, and rank 0 writes them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import nn

from dtctl import names
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.telemetry import meter
from dtctl.runtime.telemetry.metrics import MetricsWriter
from dtctl.runtime.telemetry.progress import ProgressFile, WorkerPhase
from dtctl.runtime.telemetry.sinks import MetricsSink, MlFlow, TensorBoard, WandB
from dtctl.train.batch import BatchSizes
from dtctl.train.config import TrainConfig


class TrainingReport:
    """Metrics and progress of one run.

    Attributes:
        clock: clock that measures steps.
        times: times of this worker's steps.
        progress: progress of this worker for other processes.
    """

    def __init__(
        self,
        config: TrainConfig,
        worker: Worker,
        model: nn.Module,
        *,
        tokens_per_sample: int | None,
        board: Path | None,
    ) -> None:
        """Start to measure, without writing anything.

        Args:
            config: settings of the run.
            worker: this worker.
            model: the model, not wrapped.
            tokens_per_sample: number of tokens in a sample; None if samples have none.
            board: folder for TensorBoard's event files, used if the configuration names none.
        """
        self._config, self._worker = config, worker
        self._board = Path(os.environ.get(names.RUN_DIR, ""), config.tensorboard) if config.tensorboard else board
        self._tokens = tokens_per_sample
        computed = "tf32" if config.tf32 and config.precision == "fp32" else config.precision
        self._use = meter.ModelFlopsUtilization(
            worker, computed, meter.estimate_flops_per_sample(model, tokens_per_sample)
        )
        self._metrics: MetricsWriter | None = None
        self._steps = 0
        self._parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.clock = meter.build_step_clock(worker.device)
        self.times = meter.StepTimes(self.clock)
        self.progress = ProgressFile(worker.rank, collectives=worker.backend is not None)

    def build_introduction(self, strategy: str, batch: BatchSizes, steps: int) -> str:
        """Return a description of the run on one line."""
        worker, precision = self._worker, self._config.precision
        return (
            f"{strategy} on {worker.world_size} x {worker.device.type}, {self._parameters:,} parameters, {precision}, "
            f"{batch.describe()}, {steps} steps"
        )

    @contextmanager
    def open(self, step: int, steps: int, *, kept: int | None = None, hold: bool = False) -> Iterator[None]:
        """Return the context in which lines are written.

        Args:
            step: number of steps done.
            steps: number of steps of the run; 0 if unknown.
            kept: step of the last line that is kept. None: `step`.
            hold: True if lines are held back until `release`.

        Raises:
            PlanError: a configured sink needs a package that is not installed.
        """
        if self._worker.is_first:
            path = Path(os.environ.get(names.METRICS) or names.METRICS_FILE)
            kept = step if kept is None else kept
            self._metrics = MetricsWriter(
                path, step=kept, steps=steps, sinks=self._build_metrics_sinks(step), hold=hold
            )
        self.times = meter.StepTimes(self.clock)
        self._steps = steps
        self.progress.begin(step, until=steps)
        try:
            yield
        finally:
            self.progress.end()
            if self._metrics is not None:
                self._metrics.close()

    def _build_metrics_sinks(self, step: int) -> list[MetricsSink]:
        config, sinks = self._config, list[MetricsSink]()
        if self._board is not None:
            sinks.append(TensorBoard(self._board, step=step))
        if config.wandb is not None:
            sinks.append(WandB(config.wandb, dataclasses.asdict(config)))
        if config.mlflow is not None:
            sinks.append(MlFlow(config.mlflow, dataclasses.asdict(config)))
        return sinks

    def log(
        self,
        step: int,
        loss: torch.Tensor | None,
        lr: float,
        norm: torch.Tensor | None,
        batch: BatchSizes | None,
        extra: Mapping[str, float],
        beside: Mapping[str, float],
        mean: float | None = None,
    ) -> None:
        """Write the line of a step; collective over all workers.

        Args:
            step: number of steps done.
            loss: this worker's share of the mean. None: this worker has no loss for the step, and the mean of the other
                workers is used.
            lr: learning rate of the step.
            norm: norm of the gradient, before clipping; None if it is not known.
            batch: sizes of the step's batch; None if they are not known.
            extra: further values, such as those of an evaluation.
            beside: further values that do not appear on stdout.
            mean: mean loss, if it was already exchanged.
        """
        worker = self._worker
        spread, own_s, waited = self.times.pop_time_spread()
        own = meter.measure_worker_memory(worker.device)
        together = torch.zeros(2 + 3 * worker.world_size, dtype=torch.float64)
        if loss is not None:
            together[0] = loss.double().cpu() / worker.world_size
            together[-1] = 1
        together[1 + worker.rank] = own_s
        together[1 + worker.world_size + worker.rank] = next(iter(own.values()), 0.0)
        together[1 + 2 * worker.world_size + worker.rank] = waited
        worker.sum(together)
        if self._metrics is None:
            return
        own_times, peaks, waits = together[1:-1].chunk(3)
        known = float(together[-1])
        if mean is None:
            mean = float(together[0]) * (worker.world_size / known if known < worker.world_size else 1.0)
        measured = {**beside} | spread | own | meter.find_slowest_rank(own_times) | meter.find_fullest_rank(peaks)
        measured["data_wait"] = round(float(waits.max()), 4)
        self._metrics.log(
            step,
            loss=mean,
            lr=lr,
            grad_norm=None if norm is None else float(norm),
            samples=None if batch is None else batch.total,
            tokens=None if batch is None or not self._tokens else self._tokens * batch.total,
            extra=extra,
            measured=lambda samples_per_s: measured | self._use.compute_mfu(samples_per_s),
        )

    def release(self) -> None:
        """Write the lines that were held back."""
        if self._metrics is not None:
            self._metrics.release()

    def mean(self, loss: torch.Tensor) -> float:
        """Return the mean of the loss over all workers; collective."""
        together = loss.detach().double().cpu().reshape(1) / self._worker.world_size
        self._worker.sum(together)
        return float(together)

    def step(self, step: int) -> None:
        """Record the end of a step."""
        self.times.step()
        self.progress.step(step)

    def set_length(self, steps: int) -> None:
        """Set the number of steps of the run, if it is known only after `open`."""
        self._steps = steps
        self.progress.set_length(steps)
        if self._metrics is not None:
            self._metrics.steps = steps

    def end_steps(self) -> None:
        """Report the end of all steps, so that later work, such as the last snapshot, has no time limit of a step."""
        self.progress.end()

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context of an evaluation."""
        return self._excluding_step_time(WorkerPhase.EVALUATION)

    def saving(self) -> AbstractContextManager[None]:
        """Return the context of the pause in training while a snapshot is made."""
        return self._excluding_step_time(WorkerPhase.SNAPSHOT)

    @contextmanager
    def _excluding_step_time(self, phase: WorkerPhase) -> Iterator[None]:
        """Return the context of work outside of steps (evaluation, a snapshot).

        Its time is excluded from the times of steps.
        """
        began_s = time.perf_counter()
        with self.progress.timing_phase(phase):
            yield
        seconds = time.perf_counter() - began_s
        self.times.pause(seconds)
        if self._metrics is not None:
            self._metrics.pause(seconds)

    def rewind(self, step: int, *, kept: int | None = None) -> None:
        """Remove the lines after `kept`, or after the step from which training continues."""
        self.times.pop_time_spread()
        self.progress.begin(step, until=self._steps)
        if self._metrics is not None:
            self._metrics.rewind(step if kept is None else kept)
