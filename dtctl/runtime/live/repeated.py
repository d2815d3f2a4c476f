"""Check of a step that the loss of a worker interrupted and that is repeated."""

from __future__ import annotations

import torch

from dtctl.errors import WorkerFailed
from dtctl.runtime.bits import sum_tensors
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.step import Step


def require_repeated(before: Step, now: Step, worker: Worker) -> None:
    """Refuse a repeated step whose losses differ from those before the interruption.

    The check detects state that a program keeps outside of model and optimizer, which is lost with its worker.

    Args:
        before: passes of this worker before the interruption.
        now: passes of the repeated step.
        worker: this worker.

    Raises:
        WorkerFailed: a loss differs.
    """
    if (before.number, before.position, before.batch) != (now.number, now.position, now.batch):
        return
    if worker.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        return  # kernels may add up in another order, which does not point to a fault of the program
    pairs = zip(before.losses, now.losses, strict=False)
    if all(sum_tensors({"loss": one}) == sum_tensors({"loss": other}) for one, other in pairs):
        return
    why = (
        f"step {now.number + 1} has another loss when it is repeated: the program keeps something that snapshots do not"
    )
    if worker.live is not None:
        worker.live.report("unable", why=why)
    raise WorkerFailed(
        why, where="the loss function or the model",
        hint="give what it counts a `state_dict` (docs/guides/snapshots.md), or set `job.recovery: restart`",
    )  # fmt: skip
