"""Session: the functions of the Trainer around its steps, for your own training loop.

    with session(model, optimizer, loader) as s:
        for epoch in s.epochs(3):
            for batch in s.batches:
                s.step(loss_function(model, batch))

Snapshots are made between two batches: when the loop requests the next batch, it has finished its work with the last
one. A resume begins there, so that no part of the loop's body runs twice or is left out.
"""

from __future__ import annotations

import atexit
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch

from dtctl import names
from dtctl.errors import DtctlError, PlanError
from dtctl.runtime import snapshot_saver
from dtctl.runtime.console import say, write_error_to_stderr
from dtctl.runtime.distributed.agreement import DecisionExchange
from dtctl.runtime.distributed.process_group import TEAR_DOWN_S, leave_process_group, record_failure
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.exactness.record import STEPS
from dtctl.runtime.exactness.resume_check import has_time_to_record
from dtctl.runtime.guards.consistency import require_equal_facts
from dtctl.runtime.live.control import SupervisorLink
from dtctl.runtime.own_loop.optimizer_step import OptimizerStep, Schedules, list_schedules
from dtctl.runtime.own_loop.position import DataPosition, Skip
from dtctl.runtime.own_loop.several_models import WHERE, Models, Optimizers, join_optimizers, list_models
from dtctl.runtime.own_loop.snapshots import SessionSnapshots
from dtctl.runtime.own_loop.workers import join_own_group
from dtctl.runtime.own_loop.wrappers import WrappedModel
from dtctl.runtime.stop import StopRequest
from dtctl.runtime.telemetry.report import TrainingReport
from dtctl.train import config as train_config
from dtctl.train import settings
from dtctl.train.batch import BatchSizes

if TYPE_CHECKING:
    from typing_extensions import Self

RESTART_ONLY: Final = "a lost worker restarts all: a session has no live recovery"
NOT_GIVEN: Final = (
    "best", "ema", "eval_every", "exact", "on_nan", "on_oom", "on_resize", "profile", "shares", "strategy",
)  # fmt: skip
"""Keys of `train:` for actions of the Trainer that a session leaves to the loop."""


def session(
    model: Models,
    optimizer: Optimizers,
    loader: Iterable[Any] | None = None,
    *,
    schedule: Schedules = None,
    scaler: Any = None,
    clip: float | None = None,
    accumulate: int = 1,
    every_steps: int | None = None,
    every_s: float | None = None,
    keep: int = 2,
    log_every: int = 10,
    extra_state: Mapping[str, Any] | None = None,
    skip: Skip = "auto",
) -> Session:
    """Return a session for your own training loop; use it in a `with` statement.

    The section `train:` of the spec and `--train.KEY=VALUE` take precedence over the numbers given here
    (`train.snapshot`, `clip_norm`, `accumulate`, `log_every`, `require_exact`, `timeout_s`).

    Args:
        model: as the loop calls it: plain, compiled, in DistributedDataParallel, or after fully_shard. Several by name:
            `{"maker": maker, "critic": critic}`.
        optimizer: of its parameters; several by name as well.
        loader: any iterable of batches, the same number on each worker. None: the loop reads its data itself, and
            keeps its position in `extra_state`.
        schedule: scheduler of the learning rate, which steps after each optimizer step; several by the names of their
            optimizers.
        scaler: torch.amp.GradScaler, which `step` uses.
        clip: largest 2-norm of the gradient; a larger one is scaled down to it. None: no limit.
        accumulate: number of batches in an optimizer step.
        every_steps: optimizer steps from one snapshot to the next.
        every_s: seconds from one snapshot to the next; 300 if neither is given.
        keep: number of the newest snapshots that are kept.
        log_every: steps from one line of metrics to the next.
        extra_state: further objects with state, by name: objects with `state_dict` and `load_state_dict`, or random
            generators of torch, NumPy or Python.
        skip: method by which a resume skips the batches of an epoch that were taken. `sampler`: without reading them.
            `read`: by reading them. `auto`: `read` if the loader has processes, since their random numbers depend on
            it.

    Raises:
        SpecError: a setting is out of range.
    """
    config = train_config.load(
        {
            "snapshot": {"every_steps": every_steps, "every_s": every_s, "keep": keep},
            "clip_norm": clip,
            "accumulate": accumulate,
            "log_every": log_every,
        }
    )
    return Session(
        model, optimizer, loader, config=config, schedule=schedule, scaler=scaler, extra_state=extra_state or {},
        skip=skip,
    )  # fmt: skip


class Session:
    """Training in your own loop, from the newest snapshot, or the first step, to the end.

    Attributes:
        worker: this worker.
        steps_done: number of optimizer steps done, over all attempts.
        batches: the remaining batches of this epoch; every iteration over it is one epoch.
        is_open: True inside of `with`.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        loader: Iterable[Any] | None,
        *,
        config: train_config.TrainConfig,
        schedule: Schedules,
        scaler: Any,
        extra_state: Mapping[str, Any],
        skip: Skip,
    ) -> None:
        """Store the arguments; `session` has them all. The session begins with the `with` statement."""
        self._model, self._optimizer, self._loader, self._config = model, join_optimizers(optimizer), loader, config
        schedules = {
            f"schedule.{name}" if name else "schedule": each for name, each in list_schedules(schedule).items()
        }
        self._kept = schedules if scaler is None else {**schedules, "scaler": scaler}
        self._extra_state, self._skip = dict(extra_state), skip
        self._step = OptimizerStep(optimizer, schedule, scaler, config.clip_norm)
        self.steps_done = 0
        self.batches = Batches(self)
        self.is_open = False
        self._stack = ExitStack()
        self._phase = ExitStack()
        self._stop = _AgreedStop()
        self._is_save_due = False
        self._is_in_epochs = False
        """True while the loop is in `epochs`."""

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException as exc:
            self._stack.close()
            _end_with_error(exc)
            raise
        return self

    def _open(self) -> None:
        config = self._config
        self.worker = worker = join_own_group(next(iter(list_models(self._model).values())), timeout_s=config.timeout_s)
        require_equal_facts(_compute_session_checksum(config), worker)
        if (link := SupervisorLink.build_from_environ(os.environ, worker.rank, worker.world_size)) is not None:
            link.obstacle = "the program trains in a session of dtctl.runtime, whose workers are restarted together"
        wrapped = WrappedModel(self._model, self._optimizer, worker)
        self._wrapped, self._position = wrapped, DataPosition(self._loader, worker, skip=self._skip)
        self._report = TrainingReport(config, worker, wrapped.module, tokens_per_sample=None, board=None)
        self._snapshots = SessionSnapshots(
            wrapped, self._optimizer, self._position, config=config, worker=worker, report=self._report,
            loader=self._loader, kept=self._kept, extra_state=self._extra_state,
        )  # fmt: skip
        self._recorder, self._saver = self._snapshots.recorder, self._snapshots.saver
        snapshot_saver.open_snapshot_folder(self._saver, worker)
        self._stack.callback(self._saver.close)
        if worker.is_first:
            say("\n".join(_describe_session(config, self._snapshots, wrapped, worker)))
        self.steps_done = self._snapshots.load_newest()
        self._stop.asked = self._stack.enter_context(StopRequest().handling_stop_signals())
        self._stack.enter_context(self._report.open(self.steps_done, 0, hold=self._snapshots.check.is_held))
        self._stack.callback(self._saver.wait)
        self._agreement = DecisionExchange(worker, step=self.steps_done)
        self.is_open = True

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_open, finished = False, False
        try:
            if kind is None:
                self._finish()
                finished = True
        except BaseException as error:
            exc = error
            raise
        finally:
            self._phase.close()
            self._recorder.losses.close(remove=finished)
            try:
                self._stack.close()
            finally:
                _end_with_error(exc)

    def _finish(self) -> None:
        """Store the end of the loop; collective over all workers."""
        self._phase.close()
        has_left_early = self._is_in_epochs
        if not self._snapshots.check.is_held and (self._snapshots.newest_step != self.steps_done or has_left_early):
            self._snapshots.save(
                self.steps_done, self._step.loss, needed=True, finished=True, ended=has_left_early
            )  # fmt: skip
        self._report.end_steps()
        self._agreement.close()
        self._saver.finish()

    # -- the loop -----------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Return the number of the epoch under way, from 0."""
        return self._position.epoch

    @property
    def batch(self) -> int:
        """Return the number of batches taken from this epoch, including that of the newest step."""
        return self._position.batch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining ones of `count` epochs; collective over all workers.

        The samplers receive the number of each epoch (`set_epoch`). A resume begins with the epoch that was under way.

        Raises:
            PlanError: the session has no loader.
        """
        if self._loader is None:
            raise PlanError(
                "epochs() needs the loader: without it, the batch of an epoch is not known",
                where=WHERE,
                hint="give the loader to session(), or use `s.steps_done`",
            )
        length, accumulate = self._position.length, self._config.accumulate or 1
        if length is not None:
            self._snapshots.steps = count * -(-length // accumulate)
            self._report.set_length(self._snapshots.steps)
        while self._position.epoch < count and not self._snapshots.is_ended:
            self._position.set_epoch()
            if not self._position.is_resumed_inside:
                self._snapshots.restore_generators()
            self._is_in_epochs = True
            yield self._position.epoch
            self._is_in_epochs = False
            self._position.end_epoch()
            if self._position.epoch < count or self._stop.is_agreed:
                self._cross_boundary(may_continue=False)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context of an evaluation in the middle of an epoch, whose time does not count as that of a step.

        This context is not needed between two epochs.
        """
        return self._report.evaluating()

    def step(self, loss: torch.Tensor) -> bool:
        """Run the backward pass, clip, step the optimizer and the schedule, and set the gradients to zero; collective.

        With `accumulate`, the optimizer steps in the last call for its batches, and each loss is divided by their
        number.

        Args:
            loss: loss of this worker's batch, a scalar; its mean over the batches and workers is minimized.

        Returns:
            True if the optimizer has stepped.

        Raises:
            PlanError: no batch was taken from `batches` for this call.
        """
        self.batches.require_batch("step")
        self._report.progress.backward()
        self.batches.is_taken = False
        if not self._step.run_backward(loss, self.batches.in_step):
            return False
        number, lr = self.steps_done + 1, self._step.lr
        self._step.record_gradient(self._recorder, number)
        norm, rates = self._step.clip_gradient(is_logged=self._snapshots.is_logged(number)), self._step.named_rates
        self._step.apply()
        self._end_optimizer_step(number, lr, norm, rates)
        return True

    def backward(self, loss: torch.Tensor) -> None:
        """Run a backward pass, for a step of several losses; `update` and `end_step` follow.

        Args:
            loss: a scalar on this worker.

        Raises:
            PlanError: no batch was taken from `batches`, or the step is to have several batches.
        """
        self.batches.require_batch("backward", alone=True)
        self._report.progress.backward()
        self._step.scale_backward(loss)

    def update(self, *names: str) -> None:
        """Clip the gradient of some optimizers, step them, and set all gradients to zero; collective.

        Their schedules step in `end_step`, once each.

        Args:
            names: names of the optimizers; none for all.

        Raises:
            PlanError: there is no optimizer of this name, or its parameters have no gradient.
        """
        self._step.update(names, is_logged=self._snapshots.is_logged(self.steps_done + 1))

    def end_step(self, loss: torch.Tensor | None = None) -> None:
        """Count an optimizer step that the loop has made, with `update` or by itself; collective.

        Call it after the optimizer's step. The gradients may still be there.

        Args:
            loss: loss of the step on this worker, for metrics and for the check that a resume repeats the step. None:
                there is no line of metrics, and the check uses gradients and parameters.

        Raises:
            PlanError: no batch was taken from `batches` for this step, or the step is to have several batches.
        """
        self.batches.require_batch("end_step", alone=True)
        self.batches.is_taken = False
        number, lr, self._step.loss = self.steps_done + 1, self._step.lr, None if loss is None else loss.detach()
        self._step.record_gradient(self._recorder, number)
        rates = self._step.named_rates
        self._step.end_updates()
        norm, norms = self._step.pop_update_norms(is_logged=self._snapshots.is_logged(number))
        self._end_optimizer_step(number, lr, norm, norms | rates)

    # -- a step -------------------------------------------------------------------------------------------------------

    def _end_optimizer_step(
        self, number: int, lr: float, norm: torch.Tensor | None, measured: Mapping[str, float]
    ) -> None:
        """Report a step, compare it with its record, and agree on a stop or a snapshot; collective over all workers."""
        self.steps_done, self._step.passes = number, 0
        if self._wrapped.buckets is not None:
            self._wrapped.buckets.finish_step()
        self._report.times.record_passes(None, self.batches.pop_waited_s())
        self._report.step(number)
        if self._recorder.is_wanted(number):
            self._recorder.take_update(number)
            verdict = self._recorder.exchange(number)
            if not self._stop.is_agreed:
                self._snapshots.check.conclude(verdict)
        if self._stop.is_agreed:
            return  # a step only for the record, which the next attempt repeats
        samples = self.batches.pop_samples()
        if self._snapshots.is_logged(number) and self._step.loss is not None:
            sizes = BatchSizes(micro=samples, accumulate=1, world_size=self.worker.world_size) if samples else None
            self._report.log(number, self._step.loss, lr, norm, sizes, {}, measured)
        decision = self._agreement.exchange_wishes(
            number, stop=self._stop.is_asked, save=self._snapshots.is_time()
        )  # fmt: skip
        self._stop.is_agreed = decision.stop and number != self._snapshots.steps
        wanted = self._stop.is_agreed or decision.save or self._snapshots.is_due(number)
        self._is_save_due = self._is_save_due or wanted
        if self._loader is None:
            self._cross_boundary()

    def _cross_boundary(self, *, may_continue: bool = True) -> None:
        """Make a snapshot if one is due, and exit if the workers have agreed to stop; collective over all workers.

        Args:
            may_continue: True if more steps of this epoch may follow for the record.
        """
        if self._step.passes:  # inside a step
            return
        if self._is_save_due and not self._snapshots.check.is_held:
            self._is_save_due = False
            self._snapshots.save(self.steps_done, self._step.loss, needed=self._stop.is_agreed)
        if not self._stop.is_agreed:
            return
        if self._stop.until is None:
            self._stop.at = self.steps_done
            is_recorded = self._recorder.is_recording and has_time_to_record(
                self._report.progress.slowest_s, self.worker
            )
            self._stop.until = self.steps_done + (STEPS if is_recorded else 0)
        if may_continue and self.steps_done < self._stop.until:
            return
        self._agreement.close()
        self._saver.finish()
        if self.worker.is_first:
            of = f" of {self._snapshots.steps}" if self._snapshots.steps else ""
            kept = (
                "with a snapshot"
                if self._snapshots.newest_step == self._stop.at
                else "without a snapshot: the resume was not confirmed to be exact yet"
            )
            say(f"stopped after step {self._stop.at}{of}, {kept}")
        raise SystemExit(self._stop.asked.build_stop_outcome().exit_code)


class _AgreedStop:
    """Stop that was requested by a signal to any worker."""

    def __init__(self) -> None:
        self.asked = StopRequest()
        self.is_agreed = False
        self.at = 0
        """Step of the snapshot that the next attempt resumes from."""
        self.until: int | None = None
        """Step after which this process ends; steps after `at` are taken only for the record."""

    @property
    def is_asked(self) -> bool:
        """Return whether this worker got a signal."""
        return self.asked.signal is not None


_NO_BATCH: Final = object()


class Batches:
    """Batches of a session's loader.

    Attributes:
        in_step: number of batches in the step under way.
        is_taken: True if a batch was taken since the last step, or since the last backward pass in a step.
    """

    def __init__(self, session: Session) -> None:
        """Start before the first batch."""
        self._session = session
        self.in_step, self.is_taken = 1, False
        self._waited_s = 0.0
        self._samples = 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch, including those that a resume skips."""
        return len(self._session._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of this epoch; collective over all workers."""
        session, position = self._session, self._session._position
        if session._loader is None:
            raise PlanError("the session has no loader", where=WHERE, hint="give it as the third argument of session()")
        session._phase.close()
        progress = session._report.progress
        batches = position.open_pass(session._snapshots.restore_generators, progress.forward)
        try:
            while True:
                session._cross_boundary()
                began_s = time.perf_counter()
                batch = next(batches, _NO_BATCH)
                if batch is _NO_BATCH:
                    return
                self._waited_s += time.perf_counter() - began_s
                self._take(batch)
                progress.forward()
                yield batch
        finally:
            # Time between two epochs, such as that of an evaluation, does not count as time of a step.
            if session.is_open:
                session._phase.enter_context(session._report.evaluating())

    def _take(self, batch: Any) -> None:
        session, position = self._session, self._session._position
        accumulate = session._config.accumulate or 1
        if session._step.passes == 0:
            left = accumulate if position.length is None else position.length - position.batch
            self.in_step = max(1, min(accumulate, left))
        position.batch += 1
        self.is_taken = True
        self._samples += _count_samples(batch)
        if accumulate > 1:
            session._wrapped.exchange_gradients(session._step.passes + 1 == self.in_step)

    def require_batch(self, name: str, *, alone: bool = False) -> None:
        """Refuse a step without a batch.

        Args:
            name: name of the session's method.
            alone: True if the step can have one batch only.

        Raises:
            PlanError: the session has a loader, and no batch was taken from it since the last step; or the step is to
                have several batches.
        """
        if alone and (self._session._config.accumulate or 1) > 1:
            raise PlanError(
                f"s.{name}() makes steps of one batch, and accumulate is {self._session._config.accumulate}",
                where=f"step {self._session.steps_done + 1}",
                hint="use s.step(), which adds up the gradients of several batches, or leave accumulate out",
            )
        if self._session._loader is not None and not self.is_taken:
            raise PlanError(
                f"s.{name}() was called without a batch of `s.batches`, so that a resume would not find its position",
                where=f"step {self._session.steps_done + 1}",
                hint="iterate over `s.batches` in place of the loader, or give session() no loader",
            )

    def pop_samples(self) -> int:
        """Return the number of samples on this worker since the last call."""
        samples, self._samples = self._samples, 0
        return samples

    def pop_waited_s(self) -> float:
        """Return the seconds since the last call in which the loop waited for batches."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s


def _count_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor; 0 if it has none."""
    while isinstance(batch, Mapping | list | tuple) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch) if isinstance(batch, torch.Tensor) and batch.dim() else 0


def _compute_session_checksum(config: train_config.TrainConfig) -> dict[str, int]:
    """Return a checksum of the settings that must agree on all workers, since the exchanges depend on them."""
    chosen = (
        config.snapshot, config.clip_norm, config.accumulate, config.log_every, config.require_exact, config.timeout_s
    )  # fmt: skip
    return {"the settings of the session (checksum)": zlib.crc32(repr(chosen).encode())}


def _describe_session(
    config: train_config.TrainConfig, snapshots: SessionSnapshots, model: WrappedModel, worker: Worker
) -> Iterator[str]:
    """Yield the first lines of a session's output."""
    often = f"every {config.snapshot.every_steps} steps" if config.snapshot.every_steps else ""
    timed = f"every {snapshots.every_s:g} s" if snapshots.every_s else ""
    yield (
        f"session: {model.name} on {worker.world_size} x {worker.device.type}, snapshots "
        f"{' and '.join(filter(None, (often, timed)))} in {snapshots.folder}; {RESTART_ONLY}"
    )
    given = settings.parse_settings_json(os.environ.get(names.TRAIN_CONFIG, ""), where=names.TRAIN_CONFIG)
    ignored = [f"train.{key}" for key in NOT_GIVEN if given.get(key) is not None]
    ignored += ["train.snapshot.memory"] if config.snapshot.memory is not None else []
    if ignored:
        yield f"a session does not follow {', '.join(ignored)}: do this in your loop, or use the Trainer"


def _end_with_error(exc: BaseException | None) -> None:
    """Record an error where launchers read it; an error of dtctl ends the process as with the Trainer.

    Raises:
        SystemExit: in place of an error of dtctl, which is written to stderr with its place and its hint.
    """
    if exc is None:
        return
    # Left at exit, after any `finally` of the program, which may leave the group itself.
    atexit.register(_leave_group)
    if isinstance(exc, Exception):
        record_failure(exc)
    if isinstance(exc, DtctlError):
        write_error_to_stderr(exc)
        raise SystemExit(exc.exit_code) from exc


def _leave_group() -> None:
    leave_process_group(within_s=TEAR_DOWN_S)
