"""Strategies that spread a model over the workers: one file each, and the choice among them.

single.py    one worker
elastic.py   replicas; the same bits on any number of workers
ddp.py       replicas; gradients averaged during the backward pass
accumulation.py   the passes of a step, where they simply follow each other
deferred_init.py   models that are too large for one worker
zero1.py     ddp with an optimizer whose state is divided
regroup.py   a sharded model in new process groups
sharded.py   fsdp, hsdp, tp (tensor.py), cp (context.py), ep (../moe/divide.py) and their products
unused.py    what some workers leave out of a step
pipeline.py  blocks on other workers (stages.py cuts), and products with all of them
comparison.py   outputs and gradients of divided modules beside those in one piece
trial.py     the loss of a divided model beside that in one piece
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from dtctl.errors import DtctlError, PlanError
from dtctl.runtime.batch_norm import require_synchronizable
from dtctl.runtime.console import say
from dtctl.runtime.distributed.device_mesh import device_mesh, limit_groups
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.explain import explained
from dtctl.runtime.precision import autocast
from dtctl.runtime.step import Step
from dtctl.runtime.strategies import blocks, context, trial
from dtctl.runtime.strategies.ddp import Ddp
from dtctl.runtime.strategies.elastic import Elastic, require_for
from dtctl.runtime.strategies.single import Single
from dtctl.runtime.strategies.trial import Probe
from dtctl.runtime.strategies.zero1 import Zero1
from dtctl.train.batch import Batch
from dtctl.train.compatibility import require
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees

if TYPE_CHECKING:
    from dtctl.runtime.strategies.unused import Present


class Strategy(Protocol):
    """Interface between the loop and a strategy. All methods are collective over all workers."""

    name: str
    module: nn.Module
    """Module that the loss function is called with; the user's model, perhaps wrapped."""
    inference: nn.Module
    """Module that an evaluation calls."""
    lockstep: bool
    """True if workers exchange something in each forward pass, so that all must do the same number of them."""
    sharded_state: bool
    """True if a worker may have state that rank 0 lacks."""
    absent_keys: Collection[str]
    """Names in the model's state that this worker does not have."""
    has_warm_up: bool
    """True if the first backward pass differs from all later ones, so that resuming exactly needs one to throw away."""

    @property
    def present(self) -> Present | None:
        """Return which parameters have a gradient on any worker; None where that needs no exchange of its own."""

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer over all trained parameters, just made; it may be changed."""

    def state(self) -> Mapping[str, Any]:
        """Return the state besides model and optimizer that an exact resume needs; empty on all workers, or on none."""

    def load_state(self, tree: Mapping[str, Any]) -> str | None:
        """Put back what `state` returned, empty if there is none. Returns why that is not exact, if it is not."""

    def release(self) -> None:
        """Take off what the model's parameters got; local. The strategy is not used any more."""

    def discard(self) -> None:
        """Forget what was carried over from the last gradients, on all workers: no step is taken with them."""

    def gradients(self, step: Step) -> torch.Tensor:
        """Run all passes of a step; there are no gradients before.

        Returns:
            This worker's share of the mean loss of the global batch: its mean over all workers is that loss. A scalar.
        """

    def finish(self) -> None:
        """Make the gradients equal to those of one process, after `gradients` has succeeded on all workers.

        A gradient that no worker has may be zero, until `present` is called.
        """

    def norm(self) -> torch.Tensor:
        """Return the true length of the gradient, the same on all workers."""

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradient, of length `norm`, down to `max_norm` if it is longer."""


@runtime_checkable
class Lasting(Protocol):
    """A strategy that outlives its process groups."""

    def rejoin(self, worker: Worker, degrees: Degrees) -> None:
        """Go on after `release` in new process groups with the state of this worker; collective."""


def _warn_of_wide_tensors(degrees: Degrees, worker: Worker) -> None:
    if degrees.tp > worker.local_world_size and worker.is_first:
        say(
            f"tp {degrees.tp} reaches over nodes of {worker.local_world_size} workers, and every layer waits for the "
            "network; keep tp within a node, and divide further with fsdp or pp"
        )


def choose(
    config: TrainConfig, worker: Worker, degrees: Degrees, batch: Batch, model: nn.Module, probe: Probe
) -> Strategy:
    """Spread `model`, which is whole and on the worker's device.

    Args:
        config: of the training.
        worker: this worker.
        degrees: the mesh that `config.strategy` means.
        batch: sizes of a batch.
        model: may be changed in place.
        probe: the loss of a few samples, to see whether the divided model still computes it.

    Raises:
        PlanError: settings exclude each other, or one does not fit the device or the model.
    """
    context.forget()
    require(config, degrees, accumulate=batch.accumulate)
    if worker.backend is not None:
        require_synchronizable(model, worker.device)
    if config.exact == "elastic":
        require_for(config, model)
        return Elastic(model, worker, config.seed)
    if (
        degrees.workers == 1 or worker.backend is None
    ):  # alone, or it replaces a lost one and has not come to the others yet
        return Single(model)
    if config.strategy == "zero1":
        return Zero1(model, config.ddp, worker)
    if degrees.dp == degrees.workers:
        return Ddp(model, config.ddp, worker)
    # Their parts of torch take half a second to import, which the other strategies avoid.
    from dtctl.runtime.strategies.comparison import Seen, recording
    from dtctl.runtime.strategies.pipeline import Pipeline
    from dtctl.runtime.strategies.sharded import Sharded, begin_alike, compared_modules

    _warn_of_wide_tensors(degrees, worker)
    mesh = device_mesh(degrees, worker.device.type)
    limit_groups(config.timeout_s)
    is_fsdp = degrees.fsdp > 1 and degrees.dp * degrees.fsdp == degrees.workers  # or hsdp
    # A replacement gets its state from workers that train already, and they have tried it.
    if is_fsdp or worker.replaces:
        try:
            sharded = Sharded(model, config, worker, degrees, mesh)
            limit_groups(config.timeout_s)  # and those that were made on the way
            return sharded
        except (AssertionError, RuntimeError, ValueError) as exc:
            raise explained(exc) or exc from exc
    begin_alike(model)
    halves = autocast(config.precision, worker.device)
    names = compared_modules(model, config, degrees)
    parts = blocks.find(model, config.blocks) if degrees.pp > 1 else None
    with trial.Stream(parts) as stream:
        with recording(model, names) as calls:
            expected, probe, rounding = trial.whole(probe, model, halves)
        in_one_piece = trial.compute_gradients(probe, model, parts) if parts is not None else {}
        gradients = in_one_piece
        stream.pause()
        trial.require_results_alone(probe, model, parts)
        seen = Seen(calls, halves)
        divided: Strategy
        try:
            if degrees.pp == 1:
                divided = Sharded(model, config, worker, degrees, mesh, seen)
            else:
                divided = Pipeline(model, config, worker, degrees, mesh, lambda: trial.measure(probe, model), seen)
            stream.divided()
            found = trial.measure(probe, divided.inference)
            if isinstance(divided, Pipeline):
                divided.try_gradients(probe)
                gradients = trial.take_gradients(model, in_one_piece)
        except DtctlError:
            raise
        except Exception as exc:  # whatever the model's code raises for tensors that are divided
            raise explained(exc) or PlanError(
                f"spread as {degrees}, the model cannot be computed: {str(exc).strip().partition(chr(10))[0]}",
                where="train.tp.plan" if degrees.tp > 1 else "train.strategy",
                hint='its code does not allow this; see "What the model must be like" in docs/strategies.md',
            ) from exc
    how = f"spread as {degrees}"
    trial.require_agreement(
        expected, found, worker, how=how, rounding=rounding, stream=stream.worst, gradients=(in_one_piece, gradients)
    )
    limit_groups(config.timeout_s)  # and those that were made on the way
    return divided
