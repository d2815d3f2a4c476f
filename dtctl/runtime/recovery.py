"""What the loop does when a step cannot be done as it was meant: smaller passes, another batch, back to a snapshot."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from dtctl.errors import WorkerFailed
from dtctl.runtime import micro, optim, passes, resume
from dtctl.runtime.console import say
from dtctl.runtime.oom import smaller
from dtctl.runtime.order import Schedule
from dtctl.runtime.precision import multiply
from dtctl.runtime.program_state import some_of
from dtctl.runtime.weighing import correction
from dtctl.train.batch import Batch

if TYPE_CHECKING:
    from dtctl.runtime.loop import Trainer


def accumulate(trainer: Trainer) -> torch.Tensor:
    """Gradients of one global batch, in smaller passes if a worker runs out of memory.

    Returns:
        This worker's share of the mean loss, not yet added up over workers.
    """
    while True:
        loss, short = trainer.memory.attempt(
            partial(passes.run, trainer),
            lambda: micro.backward(trainer, trainer.feed.single(trainer.schedule.stand_in), math.nan, 2),
        )
        if loss is not None and not short:
            break
        use(trainer, smaller(trainer.batch))
        if trainer.worker.is_first:
            ranks = ", ".join(map(str, short))
            say(f"out of memory on rank {ranks} in step {trainer.step + 1}: again with {trainer.batch.describe()}")
    if any(parameter.requires_grad for parameter in trainer.frozen):
        raise _thawed(trainer)
    trainer.strategy.finish()
    if trainer.weights:
        copies = trainer.place.degrees.tp * trainer.place.degrees.cp
        factor = correction(trainer.weights, trainer.schedule.samples(trainer.position), trainer.worker, copies=copies)
        multiply(trainer.gradients(), factor)
        loss = loss * factor
    return loss


def _thawed(trainer: Trainer) -> WorkerFailed:
    """The error of parameters that want gradients which nobody exchanges."""
    frozen = {id(parameter) for parameter in trainer.frozen}
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad and id(p) in frozen]
    return WorkerFailed(
        f"{some_of(names)} was frozen when training began and wants gradients in step {trainer.step + 1}",
        where=f"train.strategy ({trainer.strategy.name})",
        hint="workers exchange the gradients of what was to be trained at first: unfreeze where the script makes the "
        "model, after a snapshot, or use one worker or `exact: elastic`",
    )


def use(trainer: Trainer, sizes: Batch) -> None:
    """Go on from here with these sizes of a batch; by epochs the number of steps follows them."""
    trainer.batch = sizes
    if trainer.config.steps is not None:
        trainer.end = trainer.position + (trainer.steps - trainer.step) * sizes.total
    else:
        trainer.steps = trainer.step - (trainer.position - trainer.end) // sizes.total
        own = trainer.rate is not trainer.configured_rate
        trainer.configured_rate = optim.schedule(trainer.config, trainer.steps)
        trainer.rate = trainer.rate if own else trainer.configured_rate
    trainer.schedule = Schedule(trainer.order, sizes, rank=trainer.place.data, end=trainer.end)


def go_back(trainer: Trainer) -> None:
    """To the newest snapshot, and past the samples that were seen since: among them is what spoilt the gradient."""
    step, position = trainer.step + 1, trainer.position + trainer.schedule.samples(trainer.position)
    trainer.saver.wait()  # the newest may still be on its way
    found = resume.find(trainer.folder, trainer.worker)
    if found.path is None:
        raise WorkerFailed(f"the gradient of step {step} is not finite, and there is no snapshot to go back to")
    trainer.restore(found, going_back=True)
    if trainer.worker.is_first:
        skipped = position - trainer.position
        say(f"the gradient of step {step} is not finite: back to step {trainer.step}, {skipped} samples are left out")
    trainer.position = position
    use(trainer, trainer.batch)
