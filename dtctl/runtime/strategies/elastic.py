"""The same bits on any number of workers (`train.exact: elastic`).

The micro batches of a step are its shards: with `global_batch` and `micro_batch` fixed, their number and their samples
are the same however many workers share them. Random state belongs to the shard, and gradients are added up in the order
of shards: each worker adds up a stretch of the gradient over all of them, and then gives it to everyone. A plain
all-reduce adds in an order that follows the ranks, so its rounding depends on their number.

A step sends as much as an all-reduce does for each round of passes, and waits for it: gradients are not exchanged
while the backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.exactness import randomness
from dtctl.runtime.step import Step
from dtctl.runtime.strategies.single import Single
from dtctl.train.compatibility import not_elastic
from dtctl.train.config import TrainConfig


def require_for(config: TrainConfig, model: nn.Module) -> None:
    """Refuse what would not have the same bits; `dtctl.train.compatibility` has refused what does not need the model.

    Raises:
        PlanError: the sizes of a batch or the model do not go with `exact: elastic`, with the reason.
    """
    if config.global_batch is None or config.micro_batch is None:
        raise not_elastic("the shards follow from train.global_batch and train.micro_batch, which must both be set")
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise not_elastic(f"{name} keeps running statistics, which depend on what else its worker has seen")


class Shards:
    """The gradient of one step, shard by shard."""

    def __init__(self, model: nn.Module, parameters: Sequence[torch.Tensor], worker: Worker, seed: int) -> None:
        """Store the arguments; nothing is allocated yet.

        Args:
            model: the model; its buffers must stay as they are.
            parameters: those that are trained; the same on all workers.
            worker: this worker.
            seed: of the training.
        """
        self._worker, self._seed = worker, seed
        self._buffers = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in model.named_modules()
            for name in module._buffers
        ]
        self._versions: list[tuple[int, int]] | None = None
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._kinds = list(kinds.values())
        self._sums: list[torch.Tensor] = []

    def begin(self, step: int, shard: int) -> None:
        """Take on the random state of a shard."""
        if self._versions is None:
            self._versions = self._now()
        randomness.begin(self._seed, shard, step=step)

    def _now(self) -> list[tuple[int, int]]:
        held = (module._buffers[name] for _, module, name in self._buffers)
        return [(id(buffer), 0 if buffer is None else buffer._version) for buffer in held]

    def require_constant(self) -> None:
        """See that no buffer has changed in a pass: what it has then depends on which shards its worker has seen.

        Raises:
            PlanError: one has.
        """
        now = self._now()
        if now != self._versions:
            pairs = zip(self._buffers, now, self._versions or now, strict=True)
            changed = next(name for (name, _, _), is_now, was in pairs if is_now != was)
            raise not_elastic(f"the buffer {changed} changes in a training pass, by what its worker has seen")

    def add(self) -> None:
        """Add the gradients of a pass of each worker to the sums, in the order of ranks, and clear them; collective."""
        for index, some in enumerate(self._kinds):
            rows = self._exchanged(_flat(some))
            if len(self._sums) <= index:
                self._sums.append(rows[0].clone())
                rows = rows[1:]
            for row in rows:
                self._sums[index] += row
            for parameter in some:
                parameter.grad = None

    def finish(self) -> None:
        """Give every worker the whole sums as gradients; collective.

        A parameter that had none in any shard has none now.
        """
        for some, own in zip(self._kinds, self._sums, strict=True):
            whole = own
            if self._worker.backend is not None:
                parts = [torch.empty_like(own) for _ in range(self._worker.world_size)]
                dist.all_gather(parts, own)
                whole = torch.cat(parts)
            sizes = [parameter.numel() for parameter in some]
            *gradients, counts, _ = torch.split_with_sizes(
                whole, [*sizes, len(some), len(whole) - sum(sizes) - len(some)]
            )
            for parameter, gradient, count in zip(some, gradients, counts.tolist(), strict=True):
                parameter.grad = gradient.view_as(parameter) if count else None
        self._sums.clear()

    def _exchanged(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """This worker's stretch of the vectors of all workers, in the order of ranks."""
        if self._worker.backend is None:
            return [flat]
        workers = self._worker.world_size
        flat = nn.functional.pad(flat, (0, -len(flat) % workers))
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        return list(received.chunk(workers))


def _flat(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all gradients in one vector, zero for those that are not there, and then a 1 for each that is."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = torch.tensor([p.grad is not None for p in parameters], dtype=parts[0].dtype, device=parts[0].device)
    return torch.cat([*(part.detach().reshape(-1) for part in parts), present])


class Elastic(Single):
    """The model as it is, and the same on all workers; gradients are added up in the order of shards."""

    name = "ddp, elastic"

    def __init__(self, model: nn.Module, worker: Worker, seed: int) -> None:
        """Give every worker rank 0's model.

        Args:
            model: whole, on the worker's device; its buffers must stay as they are.
            worker: this worker.
            seed: of the training.
        """
        super().__init__(model)
        self._worker, self._seed = worker, seed
        self._shards: Shards | None = None
        if worker.backend is not None:
            for value in [*model.parameters(), *model.buffers()]:
                dist.broadcast(value.detach(), src=0)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of the parameters that are trained."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._shards = Shards(self.module, parameters, self._worker, self._seed)

    def gradients(self, step: Step) -> torch.Tensor:
        """Shard by shard, each with random numbers of its own."""
        shards = self._shards
        assert shards is not None  # noqa: S101  # for the type checker: `prepare` comes first
        workers, losses = self._worker.world_size, []
        for index, indices in enumerate(step.micro_batches):
            shards.begin(step.number, index * workers + self._worker.rank)
            batch = step.read(index)
            losses.append(step.backward(self.module, batch, len(indices) / step.samples, len(indices)))
            if step.weights:
                raise not_elastic("the loss counts tokens, of which each worker has another number")
            shards.require_constant()
            shards.add()
        shards.finish()
        return torch.stack(losses).sum() * workers
