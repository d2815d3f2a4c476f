"""Recovery after one worker has run out of memory, which all workers detect at the same step.

The peers of such a worker wait for its gradients, so it must not leave the step. Instead it sends gradients of NaN: the
exchange completes, and one number shows every worker that this step needs an agreement. A good step costs one check of
that number. On a GPU a check would wait for all queued work, so the processes exchange a flag instead, which costs less
than a millisecond while the GPU is busy.

This works if a forward pass exchanges nothing (DDP without SyncBatchNorm, and without collectives in the user's own
modules). A sharded model has collectives inside its passes, which cannot be undone. In this case the worker fails, and
the launcher restarts all workers.
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
from dtctl.train.batch import BatchSizes

LACKING: Final = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
"""Out-of-memory errors of libraries that allocate outside of torch; NCCL's error is not listed, since it is raised in a
collective that has begun."""


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in LACKING)
    )


@contextmanager
def require_enough_memory(doing: str, hint: str, worker: Worker) -> Iterator[None]:
    """Return the context of work that is not repeated in smaller parts if memory runs out.

    Args:
        doing: description of the work, for the error.
        hint: hint of the error.
        worker: this worker.

    Raises:
        WorkerFailed: memory has run out.
    """
    try:
        yield
    except RuntimeError as exc:
        raise_out_of_memory(exc, doing, hint, worker)
        raise


def raise_out_of_memory(error: RuntimeError, doing: str, hint: str, worker: Worker) -> None:
    """Raise an explained error if an error means lack of memory; see `require_enough_memory`.

    Raises:
        WorkerFailed: the error means lack of memory.
    """
    if is_lack_of_memory(error):
        what = f"out of memory in {doing}: {str(error).partition(chr(10))[0]}"
        raise WorkerFailed(what, where=f"rank {worker.rank}", hint=hint) from error


class OomGuard:
    """Detection of steps that ran out of memory, and recovery from them."""

    def __init__(self, module: nn.Module, parameters: Sequence[torch.Tensor], worker: Worker, *, wanted: bool) -> None:
        """Prepare the detection.

        Args:
            module: the model as the strategy wraps it.
            parameters: trained parameters.
            worker: this worker.
            wanted: True if the configuration enables recovery.
        """
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        # SyncBatchNorm exchanges means of the batch: those of a restarted pass would meet those of another layer.
        exchanges = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        self.can_recover = wanted and (worker.backend is None or (self._ddp is not None and not exchanges))
        """True if a step can be repeated without a restart of the workers."""
        self._worker = worker
        self._probe = parameters[0]
        self._forward_begun = False
        if self.can_recover and self._ddp is not None and any(True for _ in module.buffers()):
            self._ddp.register_forward_pre_hook(self._mark_forward_begun)

    def _mark_forward_begun(self, *_: Any) -> None:
        self._forward_begun = True

    def attempt(
        self, passes: Callable[[], torch.Tensor], stand_in: Callable[[], object]
    ) -> tuple[torch.Tensor | None, list[int]]:
        """Compute the gradients of a step; return the result of `passes`, and the ranks that ran out of memory.

        Args:
            passes: runs all passes of the step.
            stand_in: runs a short pass whose loss goes through `inject_nan`, in place of one that failed.

        Raises:
            torch.OutOfMemoryError: recovery is not possible, or not enabled.
            WorkerFailed: gradients were already being sent to other workers.
        """
        self._forward_begun = False  # DDP exchanges buffers only in the first forward pass of a step
        result = None
        try:
            result = passes()
        except RuntimeError as exc:
            if not self.can_recover or not is_lack_of_memory(exc):
                raise
        if result is None:  # outside of the handler, whose exception still refers to the activations
            self._release_cached_memory()
            if self._ddp is not None:
                self._take_part(stand_in)
        return result, self._short_of_memory(here=result is None)

    def _release_cached_memory(self) -> None:
        gc.collect()  # a traceback forms cycles that keep activations alive
        if self._worker.device.type == "cuda":
            torch.cuda.empty_cache()

    def _take_part(self, stand_in: Callable[[], object]) -> None:
        if self._ddp is not None and self._forward_begun:
            # this worker has already taken part in the exchange of buffers
            self._ddp.require_forward_param_sync = False
        try:
            stand_in()
        except RuntimeError as exc:
            raise WorkerFailed(
                "out of memory in the middle of a backward pass, when the exchange of gradients had begun",
                where=f"rank {self._worker.rank}",
                hint="lower `train.micro_batch`; the run goes on from its last snapshot",
            ) from exc

    def inject_nan(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss that makes the gradient NaN on all workers, even if a ReLU blocks the backward pass."""
        return (loss + _read_first_element(self._probe)) * math.nan

    def _short_of_memory(self, *, here: bool) -> list[int]:
        """Return the ranks that ran out of memory in this step.

        On CPUs the workers exchange this only if the gradient is NaN.
        """
        worker = self._worker
        if worker.backend is None or not self.can_recover:
            return [worker.rank] if here else []
        if self._probe.device.type == "cpu" and not self._is_poisoned():
            return []
        flags = torch.zeros(worker.world_size, dtype=torch.int64)
        flags[worker.rank] = int(here)
        return [rank for rank, flag in enumerate(worker.sum(flags).tolist()) if flag]

    def _is_poisoned(self) -> bool:
        return self._probe.grad is not None and math.isnan(float(_read_first_element(self._probe.grad)))


def _read_first_element(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first number of a tensor with any memory layout."""
    return tensor[(0,) * tensor.dim()]


def reduce_micro_batch(batch: BatchSizes) -> BatchSizes:
    """Return the same global batch in smaller passes: the micro batch is divided by its smallest prime factor.

    Raises:
        PlanError: the micro batch has one sample and cannot be divided.
    """
    if batch.micro == 1:
        raise PlanError(
            "out of memory with a micro batch of one sample",
            where="train.micro_batch",
            hint="use `checkpointing: full`, `strategy: fsdp`, a lower precision, or a smaller model",
        )
    factor = next(number for number in range(2, batch.micro + 1) if batch.micro % number == 0)
    return dataclasses.replace(batch, micro=batch.micro // factor, accumulate=batch.accumulate * factor)
