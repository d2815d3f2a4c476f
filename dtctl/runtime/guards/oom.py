"""Recovery when one worker runs out of memory: all workers detect it at the same step.

The peers of such a worker wait for its gradients, so it must not stop short. It sends them gradients of NaN: the
exchange completes, and one number shows every worker that this step needs an agreement. A good step costs one check of
that number. On a GPU a check would wait for all queued work; there the processes exchange a flag, which costs less than
a millisecond while the GPU is at work.

That works where a forward pass exchanges nothing (DDP without SyncBatchNorm, and without collectives in the user's own
modules). A sharded model has collectives in the middle of its passes, which cannot be unwound; there the worker fails,
and the launcher starts all of them again.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtctl.errors import PlanError, WorkerFailed
from dtctl.runtime.distributed.worker import Worker
from dtctl.train.batch import Batch

LACKING: Final = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
"""Out-of-memory errors of libraries that allocate past torch; NCCL's is of a collective that has begun."""


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in LACKING)
    )


@contextmanager
def enough_memory(doing: str, hint: str, worker: Worker) -> Iterator[None]:
    """The context of work that is not done again in smaller parts if memory runs out.

    Args:
        doing: what, for people.
        hint: what would help.
        worker: this worker.

    Raises:
        WorkerFailed: memory has run out.
    """
    try:
        yield
    except RuntimeError as exc:
        raise_lack_of_memory(exc, doing, hint, worker)
        raise


def raise_lack_of_memory(error: RuntimeError, doing: str, hint: str, worker: Worker) -> None:
    """Explain an error, if it is that memory has run out; see `enough_memory`.

    Raises:
        WorkerFailed: it is.
    """
    if is_lack_of_memory(error):
        what = f"out of memory in {doing}: {str(error).partition(chr(10))[0]}"
        raise WorkerFailed(what, where=f"rank {worker.rank}", hint=hint) from error


class MemoryWatch:
    """Detection of steps that ran out of memory, and recovery from them."""

    def __init__(self, module: nn.Module, parameters: Sequence[torch.Tensor], worker: Worker, *, wanted: bool) -> None:
        """Begin to watch.

        Args:
            module: the model as the strategy wraps it.
            parameters: those that are trained.
            worker: this worker.
            wanted: whether the configuration enables recovery.
        """
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        # Its passes exchange means of the batch: a restarted pass would meet those of other workers in another layer.
        exchanges = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        self.can_recover = wanted and (worker.backend is None or (self._ddp is not None and not exchanges))
        """True if a step can be repeated without starting the workers again."""
        self._worker = worker
        self._probe = parameters[0]
        self._forward_begun = False
        if self.can_recover and self._ddp is not None and any(True for _ in module.buffers()):
            self._ddp.register_forward_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._forward_begun = True

    def attempt(
        self, passes: Callable[[], torch.Tensor], stand_in: Callable[[], object]
    ) -> tuple[torch.Tensor | None, list[int]]:
        """Compute the gradients of a step; return the result of `passes`, and the ranks that ran out of memory.

        Args:
            passes: all passes of the step.
            stand_in: a short pass whose loss goes through `poison`; it takes the place of one that failed.

        Raises:
            torch.OutOfMemoryError: recovering is not possible, or not wanted.
            WorkerFailed: gradients were already on their way to the others.
        """
        self._forward_begun = False  # DDP exchanges buffers in the first forward pass of a step, and in no other
        result = None
        try:
            result = passes()
        except RuntimeError as exc:
            if not self.can_recover or not is_lack_of_memory(exc):
                raise
        if result is None:  # not in the handler: its exception still holds the activations
            self._release()
            if self._ddp is not None:
                self._take_part(stand_in)
        return result, self._short_of_memory(here=result is None)

    def _release(self) -> None:
        gc.collect()  # a traceback makes cycles, and they hold activations
        if self._worker.device.type == "cuda":
            torch.cuda.empty_cache()

    def _take_part(self, stand_in: Callable[[], object]) -> None:
        if self._ddp is not None and self._forward_begun:
            self._ddp.require_forward_param_sync = False  # this worker has had its part of the exchange of buffers
        try:
            stand_in()
        except RuntimeError as exc:
            raise WorkerFailed(
                "out of memory in the middle of a backward pass, when gradients were already on their way",
                where=f"rank {self._worker.rank}",
                hint="lower `train.micro_batch`; the run goes on from its last snapshot",
            ) from exc

    def poison(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss that makes the gradient NaN on all workers, also where the way back to it is blocked by a ReLU."""
        return (loss + _first(self._probe)) * math.nan

    def _short_of_memory(self, *, here: bool) -> list[int]:
        """The ranks that ran out of memory in this step; on CPUs the others are asked only if the gradient is NaN."""
        worker = self._worker
        if worker.backend is None or not self.can_recover:
            return [worker.rank] if here else []
        if self._probe.device.type == "cpu" and not self._is_poisoned():
            return []
        flags = torch.zeros(worker.world_size, dtype=torch.int64)
        flags[worker.rank] = int(here)
        return [rank for rank, flag in enumerate(worker.sum(flags).tolist()) if flag]

    def _is_poisoned(self) -> bool:
        return self._probe.grad is not None and math.isnan(float(_first(self._probe.grad)))


def _first(tensor: torch.Tensor) -> torch.Tensor:
    """Return one number of a tensor, however it lies in memory."""
    return tensor[(0,) * tensor.dim()]


def smaller(batch: Batch) -> Batch:
    """Return the same global batch in smaller passes: half the micro batch, or the next smaller part of an odd one.

    Raises:
        PlanError: a micro batch of one sample cannot be cut.
    """
    if batch.micro == 1:
        raise PlanError(
            "out of memory with a micro batch of one sample",
            where="train.micro_batch",
            hint="use `checkpointing: full`, `strategy: fsdp`, a lower precision, or a smaller model",
        )
    factor = next(number for number in range(2, batch.micro + 1) if batch.micro % number == 0)
    return dataclasses.replace(batch, micro=batch.micro // factor, accumulate=batch.accumulate * factor)
