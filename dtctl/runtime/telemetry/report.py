"""Report of a run about itself: every worker measures, one exchange collects the figures, rank 0 writes them."""

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
from dtctl.runtime.telemetry.progress import Progress, WorkerPhase
from dtctl.runtime.telemetry.sinks import MetricsSink, MlFlow, TensorBoard, WandB
from dtctl.train.batch import Batch
from dtctl.train.config import TrainConfig


class Report:
    """The account of one training.

    Attributes:
        clock: that steps are measured with.
        times: of this worker's steps.
        progress: of this worker, for other processes.
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
        """Begin to measure; nothing is written yet.

        Args:
            config: of the training.
            worker: this worker.
            model: not wrapped.
            tokens_per_sample: None if samples have none.
            board: folder for TensorBoard's event files, where the configuration names none.
        """
        self._config, self._worker = config, worker
        self._board = Path(os.environ.get(names.RUN_DIR, ""), config.tensorboard) if config.tensorboard else board
        self._tokens = tokens_per_sample
        computed = "tf32" if config.tf32 and config.precision == "fp32" else config.precision
        self._use = meter.Use(worker, computed, meter.flops_per_sample(model, tokens_per_sample))
        self._metrics: MetricsWriter | None = None
        self._steps = 0
        self._parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.clock = meter.clock(worker.device)
        self.times = meter.StepTimes(self.clock)
        self.progress = Progress(worker.rank, collectives=worker.backend is not None)

    def introduction(self, strategy: str, batch: Batch, steps: int) -> str:
        """Return what is trained, on one line."""
        worker, precision = self._worker, self._config.precision
        return (
            f"{strategy} on {worker.world_size} x {worker.device.type}, {self._parameters:,} parameters, {precision}, "
            f"{batch.describe()}, {steps} steps"
        )

    @contextmanager
    def open(self, step: int, steps: int, *, kept: int | None = None, hold: bool = False) -> Iterator[None]:
        """The context in which lines are written.

        Args:
            step: steps done.
            steps: length of the training.
            kept: step of the last line that stays. None: `step`.
            hold: whether lines are held back until `release`.

        Raises:
            PlanError: metrics are to go to a package that is not installed.
        """
        if self._worker.is_first:
            path = Path(os.environ.get(names.METRICS) or names.METRICS_FILE)
            kept = step if kept is None else kept
            self._metrics = MetricsWriter(path, step=kept, steps=steps, sinks=self._sinks(step), hold=hold)
        self.times = meter.StepTimes(self.clock)
        self._steps = steps
        self.progress.begin(step, until=steps)
        try:
            yield
        finally:
            self.progress.end()
            if self._metrics is not None:
                self._metrics.close()

    def _sinks(self, step: int) -> list[MetricsSink]:
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
        batch: Batch,
        extra: Mapping[str, float],
        beside: Mapping[str, float],
        mean: float | None = None,
    ) -> None:
        """Write the line of a step; collective over all workers.

        Args:
            step: steps done.
            loss: this worker's share of the mean; None if it has none of this step: then the others' mean counts.
            lr: learning rate of the step.
            norm: of the gradient, before clipping.
            batch: sizes of the step.
            extra: further values, such as those of an evaluation.
            beside: such that are not for the line on stdout.
            mean: of the loss, if it was exchanged before.
        """
        worker = self._worker
        spread, own_s, waited = self.times.take()
        own = meter.memory(worker.device)
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
        measured = {**beside} | spread | own | meter.stragglers(own_times) | meter.fullest(peaks)
        measured["data_wait"] = round(float(waits.max()), 4)
        self._metrics.log(
            step,
            loss=mean,
            lr=lr,
            grad_norm=float(norm) if norm is not None else 0.0,
            samples=batch.total,
            tokens=self._tokens and self._tokens * batch.total,
            extra=extra,
            measured=lambda samples_per_s: measured | self._use.of(samples_per_s),
        )

    def release(self) -> None:
        """Write the lines that were held back, if any were."""
        if self._metrics is not None:
            self._metrics.release()

    def mean(self, loss: torch.Tensor) -> float:
        """Return the mean of the loss over all workers; collective."""
        together = loss.detach().double().cpu().reshape(1) / self._worker.world_size
        self._worker.sum(together)
        return float(together)

    def step(self, step: int) -> None:
        """A step is done."""
        self.times.step()
        self.progress.step(step)

    def through(self) -> None:
        """There are no more steps; what follows, such as writing the last snapshot, takes as long as it takes."""
        self.progress.end()

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context of an evaluation."""
        return self._apart(WorkerPhase.EVALUATION)

    def saving(self) -> AbstractContextManager[None]:
        """Return the context of what training stops for when a snapshot is made."""
        return self._apart(WorkerPhase.SNAPSHOT)

    @contextmanager
    def _apart(self, phase: WorkerPhase) -> Iterator[None]:
        """The context of what is not a step (evaluation, a snapshot): its time is left out of the times of steps."""
        began_s = time.perf_counter()
        with self.progress.apart(phase):
            yield
        seconds = time.perf_counter() - began_s
        self.times.pause(seconds)
        if self._metrics is not None:
            self._metrics.pause(seconds)

    def rewind(self, step: int, *, kept: int | None = None) -> None:
        """Remove the lines after `kept`, or after the step that training continues from."""
        self.times.take()
        self.progress.begin(step, until=self._steps)
        if self._metrics is not None:
            self._metrics.rewind(step if kept is None else kept)
