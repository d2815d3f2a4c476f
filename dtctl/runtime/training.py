"""Parts of a run on one worker, and the function that builds them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dtctl.runtime import blocks, kernels, randomness, resume, snapshot_saver
from dtctl.runtime.automatic import TrainingInputs, resolve_strategy
from dtctl.runtime.console import say
from dtctl.runtime.data_loading import datasets
from dtctl.runtime.data_loading.feed import BatchLoader
from dtctl.runtime.data_loading.loaders import adapt_training_data, has_own_order
from dtctl.runtime.data_loading.reading import BatchReader
from dtctl.runtime.data_loading.shares import compute_replica_shares
from dtctl.runtime.distributed.agreement import DecisionExchange
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.engine import TrainingEngine
from dtctl.runtime.exactness import program_fingerprint, run_conditions
from dtctl.runtime.exactness.record import StepRecorder
from dtctl.runtime.exactness.resume_check import ResumeCheck
from dtctl.runtime.exactness.stateful import require_stateful
from dtctl.runtime.frozen_weights import FrozenWeights
from dtctl.runtime.guards.consistency import build_training_fingerprint, compute_settings_checksum, require_equal_facts
from dtctl.runtime.hooks import Hook, HookRunner
from dtctl.runtime.live.transaction import StepTransaction
from dtctl.runtime.memory_snapshots import MemorySnapshots
from dtctl.runtime.position import TrainingPosition
from dtctl.runtime.snapshot.saver import Saver
from dtctl.runtime.snapshot_saver import SnapshotWriters
from dtctl.runtime.strategies import deferred_init
from dtctl.runtime.telemetry.report import TrainingReport
from dtctl.runtime.trained_model import TrainedModel
from dtctl.runtime.training_settings import TrainingSettings
from dtctl.runtime.training_state import TrainingState
from dtctl.train.batch import BatchSizes, compute_batch_sizes
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Coordinate


@dataclass(slots=True, kw_only=True)
class Training:
    """Parts of one run on this worker."""

    settings: TrainingSettings
    trained: TrainedModel
    """Model and optimizer."""
    engine: TrainingEngine
    """Passes of a step."""
    position: TrainingPosition
    report: TrainingReport
    """Metrics and progress."""
    snapshots: SnapshotWriters
    check: ResumeCheck
    """Check of a resume by the steps that it repeats."""
    hooks: HookRunner
    extra_state: Mapping[str, Any]
    """Further objects with state, by name."""
    draws: randomness.StepRandomStream
    """Random numbers of each step."""
    frozen: FrozenWeights | None = None
    """Weights that snapshots leave out; None if they have all."""
    transaction: StepTransaction = field(default_factory=StepTransaction)
    """The step under way, for live recovery."""
    agreement: DecisionExchange | None = None
    """Exchange by which the workers agree on stops and snapshots; None before the first step."""
    _account: program_fingerprint.ProgramFingerprint | None = None

    @property
    def account(self) -> program_fingerprint.ProgramFingerprint:
        """Return the fingerprint of this program before its first step; the first call is collective."""
        if self._account is None:
            self._account = self._take_account(self.settings.worker)
        return self._account

    def retake_account(self) -> None:
        """Take the fingerprint again, after the model was divided; local."""
        self._account = self._take_account(replace(self.settings.worker, backend=None))

    def _take_account(self, worker: Worker) -> program_fingerprint.ProgramFingerprint:
        settings, engine = self.settings, self.engine
        subject = program_fingerprint.FingerprintInputs(
            model=self.trained.model,
            loss=engine.loss,
            optimizer=self.trained.optimizer,
            rate=self.trained.rate.own,
            extra_state=self.extra_state,
            apart=[self, settings.config, settings.config.data, settings.config.model],
            feed=engine.feed,
            first=np.asarray(self.position.schedule.positions(0)[0]),
        )
        return program_fingerprint.build_training_account(subject, worker, elastic=settings.is_elastic)

    @property
    def state(self) -> TrainingState:
        """Return the state that snapshots hold next to the counters of the loop."""
        settings, trained = self.settings, self.trained
        return TrainingState(
            model=trained.model,
            optimizer=trained.optimizer,
            configured=trained.configured,
            strategy=self.engine.strategy,
            ema=trained.ema,
            worker=settings.worker,
            account=self.account,
            seed=settings.config.seed,
            stream=settings.place.stream,
            elastic=settings.is_elastic,
            frozen=self.frozen,
        )

    def collect_counters(self) -> dict[str, Any]:
        """Return the counters of the loop that a snapshot keeps; JSON."""
        position, trained, best = self.position, self.trained, self.snapshots.best
        return {
            "position": position.samples,
            "lineage": self.check.recorder.losses.lineage,
            "circumstances": self.settings.circumstances,
            "batch": resume.build_batch_facts(position.asked, position.batch),
            "rate_factor": trained.rate.factor,
            "ended": position.is_ended,
            "chosen": self.settings.chosen,
            "best": best and best.state(),
            "loss_scale": trained.loss_scale and trained.loss_scale.state(),
        }

    def set_batch_sizes(self, sizes: BatchSizes) -> None:
        """Use other batch sizes from here on; if the run counts epochs, its number of steps changes with them."""
        self.position.set_batch_sizes(sizes)
        if self.settings.config.steps is None:
            self.trained.rate.set_total_steps(self.position.steps)
            self.settings.circumstances["steps"] = self.position.steps

    def save(self, *, needed: bool = True) -> None:
        """Begin a snapshot of this step on disk; collective over all workers.

        Args:
            needed: True if the snapshot must not be skipped, even if another one is still being written.
        """
        with self.report.saving():
            self.engine.check_newest_gradient(self.position.step)
            self.snapshots.save(self.position.step, self.state, self.collect_counters(), needed=needed)
        self._record_following_steps(self.snapshots.saver)

    def save_in_memory(self, memory: MemorySnapshots) -> None:
        """Begin a snapshot of this step in the memory of the nodes; collective over all workers."""
        began_s = time.perf_counter()
        with self.report.saving():
            self.engine.check_newest_gradient(self.position.step)
            parts, facts = self.state.collect(in_pieces=True)
            # The interval between these snapshots follows from their cost, of which the sums of steps are a part.
            began_s -= self.check.recorder.pop_spent_s()
            memory.save(self.position.step, parts, {**self.collect_counters(), **facts}, began_s=began_s)
        self._record_following_steps(memory.saver)

    def _record_following_steps(self, saver: Saver) -> None:
        """Record the bits of the next steps next to the snapshot that has just begun; collective."""
        if self.position.step < self.position.steps:
            self.check.recorder.start_recording(self.position.step, saver)


def build_training(
    config: TrainConfig,
    worker: Worker,
    inputs: TrainingInputs,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None,
    rate: Callable[[int], float] | None,
    extra_state: Mapping[str, Any],
    hooks: Sequence[Hook],
    board: Path | None,
) -> Training:
    """Build the parts of a run; collective over all workers. See `Trainer` for the arguments.

    Raises:
        PlanError: the configuration does not fit these workers or this data, or the workers differ.
    """
    adapted = adapt_training_data(inputs.samples, config, worker)
    config, inputs = adapted.config, replace(inputs, samples=adapted.data)
    if adapted.line is not None and worker.is_first:
        say(adapted.line)
    require_equal_facts(compute_settings_checksum(config), worker)
    kernels.apply_kernel_settings(config, worker.device.type)
    folder = snapshot_saver.choose_snapshot_folder(config.snapshot, os.environ)
    resolved = resolve_strategy(config, worker, inputs, folder)
    config, data = resolved.config, inputs.samples
    place = Coordinate(degrees=resolved.degrees, rank=worker.rank)
    settings = TrainingSettings(
        config=config, worker=worker, place=place, samples=datasets.count_samples(data), chosen=resolved.kept
    )
    shares = compute_replica_shares(resolved.shares, place.degrees)
    sizes = compute_batch_sizes(config, place.degrees.data, stages=place.degrees.pp, shares=shares)
    position = TrainingPosition(
        config, sizes, samples=settings.samples, in_order=has_own_order(data), rank=place.data
    )  # fmt: skip

    model = _build_model(settings, inputs.model, steps=position.steps)
    feed = BatchLoader(BatchReader(data, config.seed), config, worker.device)
    tokens = getattr(data, "tokens_per_sample", None)
    report = TrainingReport(config, worker, model, tokens_per_sample=tokens, board=board)
    engine = TrainingEngine(settings, model, inputs.loss, feed, report, sizes)
    trained = TrainedModel(config, model, engine.strategy, optimizer=optimizer, rate=rate, steps=position.steps)

    runner = HookRunner(hooks, worker)
    states = {**extra_state, **runner.list_stateful()}
    require_stateful(states)
    snapshots = SnapshotWriters(settings, folder, model, report.progress, sharded_state=engine.strategy.sharded_state)
    settings.circumstances.update(
        run_conditions.collect_train_settings(config, worker, sizes, samples=settings.samples, steps=position.steps)
    )
    if not settings.is_elastic:
        settings.circumstances["mesh"] = str(place.degrees)
    training = Training(
        settings=settings,
        trained=trained,
        engine=engine,
        position=position,
        report=report,
        snapshots=snapshots,
        check=ResumeCheck(
            StepRecorder(worker, trained.model, trained.optimizer),
            config=config,
            worker=worker,
            folder=folder,
            report=report,
            release=runner.release,
        ),
        hooks=runner,
        extra_state=states,
        draws=randomness.StepRandomStream(config.seed, place.stream, worker.device),
        frozen=FrozenWeights(model, worker) if config.snapshot.trained_only else None,
    )
    engine.attach_optimizer(trained, training.set_batch_sizes)
    return training


def _build_model(settings: TrainingSettings, model: nn.Module | Callable[[], nn.Module], *, steps: int) -> nn.Module:
    """Return the model as this worker trains it, before it is divided; collective."""
    config, worker, degrees = settings.config, settings.worker, settings.place.degrees
    built = deferred_init.build(model, worker, degrees)
    kernels.lay_out(built, config, degrees)
    require_equal_facts(build_training_fingerprint(built, degrees, samples=settings.samples, steps=steps), worker)
    blocks.prepare_blocks(built, config)
    return built
