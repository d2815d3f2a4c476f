"""Strategies that divide a model over the workers, one file each, and the choice among them.

single.py    one worker
elastic.py   replicas; the same bits on any number of workers
ddp.py       replicas; gradients averaged during the backward pass
accumulation.py   the passes of a step, one after another
deferred_init.py   models that are too large for one worker
zero1.py     ddp with an optimizer whose state is divided
regroup.py   a sharded model in new process groups
sharded.py   fsdp, hsdp, tp (tensor.py), cp (context.py), ep (../moe/divide.py) and their products
unused.py    parameters and blocks that some workers leave out of a step
pipeline.py  blocks on other workers (stages.py cuts), and products with all of them
comparison.py   comparison of divided modules with the whole ones, by outputs and gradients
trial.py     comparison of the divided model with the whole one, by its loss
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from dtctl.errors import DtctlError, PlanError
from dtctl.runtime.batch_norm import require_synchronizable
from dtctl.runtime.console import say
from dtctl.runtime.distributed.device_mesh import build_device_mesh, limit_groups
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.explain import explain_error
from dtctl.runtime.precision import make_autocast
from dtctl.runtime.step import Step
from dtctl.runtime.strategies import blocks, context, trial
from dtctl.runtime.strategies.ddp import Ddp
from dtctl.runtime.strategies.elastic import Elastic, require_for
from dtctl.runtime.strategies.single import Single
from dtctl.runtime.strategies.trial import Probe
from dtctl.runtime.strategies.zero1 import Zero1
from dtctl.train.batch import BatchSizes
from dtctl.train.compatibility import require
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees

if TYPE_CHECKING:
    from dtctl.runtime.strategies.unused import UsedParameters


class Strategy(Protocol):
    """Interface between the loop and a strategy. All methods are collective over all workers."""

    name: str
    module: nn.Module
    """Module that the loss function is called with; the user's model, perhaps wrapped."""
    inference: nn.Module
    """Module that an evaluation calls."""
    lockstep: bool
    """True if workers exchange data in each forward pass, so that all must make the same number of passes."""
    sharded_state: bool
    """True if a worker may have state that rank 0 lacks."""
    absent_keys: Collection[str]
    """Names in the model's state that belong to other workers."""
    has_warm_up: bool
    """True if the first backward pass differs from later ones, so that an exact resume needs a discarded one first."""

    @property
    def present(self) -> UsedParameters | None:
        """Return the record of parameters with a gradient on any worker; None if no separate exchange is needed."""

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a new optimizer over all trained parameters; it may be changed."""

    def state(self) -> Mapping[str, Any]:
        """Return the state besides model and optimizer that an exact resume needs; empty on all workers, or on none."""

    def load_state(self, tree: Mapping[str, Any]) -> str | None:
        """Restore what `state` returned, empty if there is none; return the reason if that is not exact, else None."""

    def release(self) -> None:
        """Remove the strategy's changes from the model's parameters; local. The strategy is not used after that."""

    def discard(self) -> None:
        """Forget state that was carried over from the last gradients, since no step is taken with them.

        All workers do this at the same step.
        """

    def gradients(self, step: Step) -> torch.Tensor:
        """Run all passes of a step, before which no parameter has a gradient.

        Returns:
            This worker's share of the mean loss, a scalar: the mean of the shares over all workers is that loss.
        """

    def finish(self) -> None:
        """Make the gradients equal to those of one process, after `gradients` has succeeded on all workers.

        A gradient that no worker has may be zero until `present` is used.
        """

    def norm(self) -> torch.Tensor:
        """Return the norm of the whole gradient, the same on all workers."""

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradient, of norm `norm`, down to `max_norm` if it is larger."""


@runtime_checkable
class SupportsRejoin(Protocol):
    """Strategy that outlives its process groups."""

    def rejoin(self, worker: Worker, degrees: Degrees) -> None:
        """Continue after `release` in new process groups with the state of this worker; collective."""


def _warn_of_wide_tensors(degrees: Degrees, worker: Worker) -> None:
    if degrees.tp > worker.local_world_size and worker.is_first:
        say(
            f"tp {degrees.tp} reaches over nodes of {worker.local_world_size} workers, and every layer waits for the "
            "network; keep tp within a node, and divide further with fsdp or pp"
        )


def build_strategy(
    config: TrainConfig, worker: Worker, degrees: Degrees, batch: BatchSizes, model: nn.Module, probe: Probe
) -> Strategy:
    """Divide `model`, which is whole and on the worker's device, over the workers.

    Args:
        config: settings of the run.
        worker: this worker.
        degrees: the mesh for `config.strategy`.
        batch: sizes of a batch.
        model: the model, which may be changed in place.
        probe: returns the loss of a few samples, to check that the divided model computes the same.

    Raises:
        PlanError: settings exclude each other, or one does not fit the device or the model.
    """
    context.restore_torch_attention()
    require(config, degrees, accumulate=batch.accumulate)
    if worker.backend is not None:
        require_synchronizable(model, worker.device)
    if config.exact == "elastic":
        require_for(config, model)
        return Elastic(model, worker, config.seed)
    if (
        degrees.workers == 1 or worker.backend is None
    ):  # a single worker, or a replacement that has not joined the others yet
        return Single(model)
    if config.strategy == "zero1":
        return Zero1(model, config.ddp, worker)
    if degrees.dp == degrees.workers:
        return Ddp(model, config.ddp, worker)
    # Their parts of torch take half a second to import, which other strategies do not need.
    from dtctl.runtime.strategies.comparison import RecordedCalls, record_module_calls
    from dtctl.runtime.strategies.pipeline import Pipeline
    from dtctl.runtime.strategies.sharded import FullySharded, begin_alike, list_compared_modules

    _warn_of_wide_tensors(degrees, worker)
    mesh = build_device_mesh(degrees, worker.device.type)
    limit_groups(config.timeout_s)
    is_fsdp = degrees.fsdp > 1 and degrees.dp * degrees.fsdp == degrees.workers  # or hsdp
    # The other workers are training already and have tried the model, so a replacement does not.
    if is_fsdp or worker.is_replacement:
        try:
            sharded = FullySharded(model, config, worker, degrees, mesh)
            limit_groups(config.timeout_s)  # this includes groups that the strategy has made
            return sharded
        except (AssertionError, RuntimeError, ValueError) as exc:
            raise explain_error(exc) or exc from exc
    begin_alike(model)
    halves = make_autocast(config.precision, worker.device)
    names = list_compared_modules(model, config, degrees)
    parts = blocks.find_repeated_blocks(model, config.blocks) if degrees.pp > 1 else None
    with trial.BlockInputRecorder(parts) as stream:
        with record_module_calls(model, names) as calls:
            expected, probe, rounding = trial.measure_whole_model(probe, model, halves)
        stream.require_one_shape()
        in_one_piece = trial.compute_gradients(probe, model, parts) if parts is not None else {}
        gradients = in_one_piece
        stream.pause()
        trial.require_results_alone(probe, model, parts)
        seen = RecordedCalls(calls, halves)
        divided: Strategy
        try:
            if degrees.pp == 1:
                divided = FullySharded(model, config, worker, degrees, mesh, seen)
            else:
                divided = Pipeline(model, config, worker, degrees, mesh, lambda: trial.measure_loss(probe, model), seen)
            stream.start_comparison()
            found = trial.measure_loss(probe, divided.inference)
            if isinstance(divided, Pipeline):
                divided.try_gradients(probe)
                gradients = trial.take_gradients(model, in_one_piece)
        except DtctlError:
            raise
        except Exception as exc:  # the model's code may raise any error for divided tensors
            raise explain_error(exc) or PlanError(
                f"divided as {degrees}, the model cannot be computed: {str(exc).strip().partition(chr(10))[0]}",
                where="train.tp.plan" if degrees.tp > 1 else "train.strategy",
                hint='its code does not allow this; see "What the model must be like" in docs/strategies.md',
            ) from exc
    how = f"spread as {degrees}"
    trial.require_agreement(
        expected,
        found,
        worker,
        how=how,
        rounding=rounding,
        stream=stream.max_relative_difference,
        gradients=(in_one_piece, gradients),
    )
    limit_groups(config.timeout_s)  # this includes groups that the strategy has made
    return divided
