"""Snapshots of a session: their contents, the resume from the newest one, and the verdict on it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final

import torch

from dtctl import names
from dtctl.errors import SnapshotError, WorkerFailed
from dtctl.runtime import randomness, resume, snapshot_saver
from dtctl.runtime.console import say
from dtctl.runtime.data_loading.reading import DatasetExamination
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.exactness import program_fingerprint, run_conditions
from dtctl.runtime.exactness.record import StepRecorder
from dtctl.runtime.exactness.resume_check import ResumeCheck
from dtctl.runtime.exactness.stateful import StatefulObjects, put_encoded_state, require_stateful
from dtctl.runtime.frozen_weights import FrozenWeights
from dtctl.runtime.own_loop.position import DataPosition
from dtctl.runtime.own_loop.wrappers import WrappedModel
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.runtime.snapshot.state import read_optimizer_settings
from dtctl.runtime.telemetry.report import TrainingReport
from dtctl.runtime.training_state import TrainingState
from dtctl.train.config import DEFAULT_SNAPSHOT_S, TrainConfig

BEFORE: Final = "random_before"
"""Part of a snapshot with the random states of all workers when their pass over the loader began."""
LOADER: Final = "loader_generators"
BUCKETS: Final = "ddp_buckets"
"""Names in `extra_state` that a session adds."""
NO_END: Final = 1 << 62
"""Last step of a loop whose length is unknown."""


class SessionSnapshots:
    """Snapshots of one session.

    Attributes:
        check: check of a resume by the steps that it repeats.
        recorder: recorder of the steps after each snapshot.
        saver: writer of the snapshots.
        newest_step: step of the newest snapshot of this process, or of the one that it resumed from; None if there is
            none.
        is_ended: True if the loop had left its epochs early when the snapshot was made.
        steps: number of steps of the run; 0 if unknown.
    """

    def __init__(
        self,
        model: WrappedModel,
        optimizer: torch.optim.Optimizer,
        position: DataPosition,
        *,
        config: TrainConfig,
        worker: Worker,
        report: TrainingReport,
        loader: Any,
        kept: Mapping[str, Any],
        extra_state: Mapping[str, Any],
    ) -> None:
        """Prepare to save and to resume; collective over all workers.

        Args:
            model: the model of this worker.
            optimizer: optimizer of its parameters.
            position: position in the data.
            config: when to make snapshots, and where.
            worker: this worker.
            report: metrics and progress of the run.
            loader: loader of the batches.
            kept: arguments of the session that have state, by name.
            extra_state: the program's own objects with state, by name.

        Raises:
            PlanError: an object has no state that snapshots can keep.
        """
        self._config, self._worker, self._report, self._position = config, worker, report, position
        self.folder = snapshot_saver.choose_snapshot_folder(config.snapshot, os.environ)
        extra = {**extra_state, **kept}
        require_stateful(extra, where="dtctl.runtime.session")
        self.recorder = StepRecorder(worker, model.module, optimizer)
        self.check = ResumeCheck(self.recorder, config=config, worker=worker, folder=self.folder, report=report)
        self._extra = {**extra, **({LOADER: position.generators} if position.generators else {})}
        if model.buckets is not None:
            self._extra[BUCKETS] = model.buckets
        if position.has_own_state:
            self._extra["loader"] = loader
        self._model, self._buckets = model, model.buckets
        data = {} if loader is None else {
            name: getattr(loader, name) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")
            if getattr(loader, name, None) is not None
        }  # fmt: skip
        roots = {"model": model.module, "optimizer": optimizer, "loader": data}
        roots |= {f"extra_state.{name}": value for name, value in extra_state.items()}
        # The order of DDP's buckets is brought back before the state of the program is looked at for changes.
        apart = [
            self, position, *self._extra.values(), *position.generators.data, *getattr(optimizer, "optimizers", ())
        ]  # fmt: skip
        account = program_fingerprint.build_program_fingerprint(
            StatefulObjects(roots, apart=[each for each in apart if each not in roots.values()]),
            {name: root for name, root in roots.items() if root is not data},
            DatasetExamination(),
            worker,
            extra=self._extra,
        )
        self.state = TrainingState(
            model=model.module,
            optimizer=optimizer,
            configured=read_optimizer_settings(optimizer),
            strategy=model,
            ema=None,
            worker=worker,
            account=account,
            seed=config.seed,
            stream=worker.rank,
            elastic=False,
            frozen=FrozenWeights(model.module, worker) if config.snapshot.trained_only else None,
        )
        self.saver = snapshot_saver.build_snapshot_saver(
            config.snapshot, self.folder, worker, model.module, progress=report.progress,
            sharded_state=model.sharded_state,
        )  # fmt: skip
        self.every_s = config.snapshot.every_s
        if self.every_s is None and config.snapshot.every_steps is None:
            self.every_s = DEFAULT_SNAPSHOT_S
        self._saved_s = time.monotonic()
        self.newest_step: int | None = None
        self.is_ended = False
        self.steps = 0
        self._local: Mapping[str, Any] = {}
        self._random: randomness.State | None = None
        self._circumstances = {
            "accumulate": config.accumulate or 1, "clip": config.clip_norm, "workers": worker.world_size,
            "batch_size": position.document()["batch_size"], "batches": position.length, "model": model.name,
            "device": torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(), "torch": torch.__version__,
        }  # fmt: skip

    def is_logged(self, step: int) -> bool:
        """Return whether metrics have a line for this step."""
        return step % self._config.log_every == 0 or step == self.steps

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot is due by the number of steps; the result is the same on all workers."""
        every = self._config.snapshot.every_steps
        return every is not None and step % every == 0

    def is_time(self) -> bool:
        """Return whether a snapshot is due by the clock of the first worker."""
        is_over = self.every_s is not None and time.monotonic() - self._saved_s >= self.every_s
        return self._worker.is_first and is_over

    def save(
        self, step: int, loss: torch.Tensor | None, *, needed: bool, finished: bool = False, ended: bool = False
    ) -> None:
        """Begin a snapshot of this step; collective over all workers.

        Args:
            step: number of steps done.
            loss: this worker's loss of the newest step; None if unknown.
            needed: True if the snapshot must not be skipped, even if another one is still being written.
            finished: True if no step follows.
            ended: True if the loop has left its epochs early.

        Raises:
            WorkerFailed: the loss is not finite, so that no snapshot may contain this state.
        """
        with self._report.saving():
            self._require_finite(step, loss)
            before = randomness.gather_rng_states(self._worker, self._position.begun)
            parts, facts = self.state.collect(in_pieces=self.saver.in_pieces)
            if before is not None:
                parts[BEFORE] = before
            facts |= {
                "loop": resume.SESSION, "lineage": self.recorder.losses.lineage, "circumstances": self._circumstances,
                "data": self._position.document(), "steps": self.steps, "finished": finished, "ended": ended,
            }  # fmt: skip
            if self._worker.is_first or self.saver.collective:
                self.saver.save(step, parts, facts=facts, needed=needed)
        self._saved_s, self.newest_step = time.monotonic(), step
        if not finished:
            self.recorder.start_recording(step, self.saver)

    def _require_finite(self, step: int, loss: torch.Tensor | None) -> None:
        is_bad = loss is not None and not bool(torch.isfinite(loss.detach()).all())
        ranks = [str(rank) for rank, bad in enumerate(gather_json(is_bad, self._worker)) if bad]
        if ranks:
            raise WorkerFailed(
                f"the loss of step {step} is not finite on rank {', '.join(ranks)}",
                where="dtctl.runtime.session",
                hint="the newest snapshot is from an earlier step; lower the learning rate, set `clip`, or look "
                "at the data of this step",
            )

    def load_newest(self) -> int:
        """Load the newest good snapshot, if there is one, and report the result; collective over all workers.

        Returns:
            Number of steps done.

        Raises:
            SnapshotError: the snapshot does not fit this model, optimizer or loader.
        """
        point = resume.find_resume_point(self.folder, self._worker, loop=resume.SESSION)
        self.recorder.losses.begin(
            self.folder, self._worker, before=point.facts.get("lineage", ""), step=point.step
        )  # fmt: skip
        lines = [f"snapshot skipped: {reason}" for reason in point.rejected]
        verdict = None
        if point.path is None:
            if os.environ.get(names.ATTEMPT, "0") != "0":
                lines.append("there is no snapshot yet: this attempt begins at step 0 again")
        else:
            try:
                known = self._restore(point)
            except SnapshotError as exc:
                exc.where = exc.where or point.path
                raise
            is_same = point.facts["circumstances"].get("workers") == self._worker.world_size
            is_last = point.facts["finished"] or point.facts["steps"] == point.step
            end = point.step if is_last else NO_END
            verdict = self.check.start_comparison(self.state, point, known, end=end, losses=is_same)
            differing = f"known to differ: {'; '.join(known)}" if known else "nothing known differs"
            lines.append(f"resumed at step {point.step}: {differing}")
            if self.is_ended:
                why = f"the loop has left its epochs early; start over without {self.folder}"
                lines.append(f"nothing is left to do: {why}")
            self.newest_step = point.step
            told = {"step": point.step, "verdict": None, "steps": 0, "differs": None, "why": known}
            if self._worker.is_first:
                self._report.progress.report_resume(resumed=told)
        if self._worker.is_first and lines:
            say("\n".join(lines))
        self.check.conclude(verdict)
        if self.state.frozen is not None:
            self.state.frozen.record()
        return point.step

    def _restore(self, point: resume.ResumePoint) -> list[str]:
        """Restore a snapshot; return the known differences from it, a phrase each."""
        facts, rank = point.facts, self._worker.rank
        parts = point.parts(self.state.model, self.state.optimizer, self._worker)
        self._local = {"local": parts.get("local", {})}
        self._require_own_state(facts)
        if self._buckets is not None:
            # This comes first, since the pass changes buffers.
            self._load_bucket_order(rank)
            self._buckets.apply()
        self._position.seek(facts["data"], randomness.select_rank_state(parts[BEFORE], rank))
        differing = self.state.load(parts, facts, step=point.step, held={}, going_back=False)
        self._random = randomness.capture_rng_states(self._worker.device)
        self.is_ended = bool(facts["ended"])
        differing += program_fingerprint.find_program_differences(self.state.account, parts, facts, rank)
        if self._worker.is_first:
            differing += run_conditions.describe_changed_facts(facts["circumstances"], self._circumstances)
        reports = gather_json(differing, self._worker)
        return list(dict.fromkeys(phrase for phrases in reports for phrase in phrases))

    def _find_local_state(self, rank: int) -> Mapping[str, Any] | None:
        local = self._local["local"]
        found: Mapping[str, Any] | None = local.get(program_fingerprint.EVERYONE, local.get(str(rank)))
        return found

    def _require_own_state(self, facts: Mapping[str, Any]) -> None:
        """Refuse a worker whose state, such as that of a schedule, is missing in the snapshot.

        Raises:
            SnapshotError: there are more workers now, and each had a state of its own.
        """
        own = self._find_local_state(self._worker.rank)
        lacking = [rank for rank, lacks in enumerate(gather_json(own is None, self._worker)) if lacks]
        if lacking and self._local["local"].keys() | self._extra.keys():
            then = facts["data"]["workers"]
            raise SnapshotError(
                f"the snapshot has no state of the program for rank {', '.join(map(str, lacking))}: it was made by "
                f"{then} workers, each with a state of its own",
                hint=f"resume with {then} workers, or fewer",
            )

    def _load_bucket_order(self, rank: int) -> None:
        own = self._find_local_state(rank) or {}
        kept = own.get(program_fingerprint.EXTRA, {}).get(BUCKETS)
        if kept is not None and self._buckets is not None:
            put_encoded_state(self._buckets, kept)

    def restore_generators(self) -> None:
        """Restore the random states of the snapshot once, when the loader has reached its position."""
        if self._random is None:
            return
        local, self._local = self._local, {}
        self.state.account.extra = {LOADER: self._position.generators} if self._position.generators else {}
        try:
            self.state.account.load(local, self._worker.rank)
        finally:
            self.state.account.extra = self._extra
        random, self._random = self._random, None
        randomness.restore_rng_states(random, self._worker.device)
