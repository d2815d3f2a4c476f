"""Training with the same bits on any number of workers (`train.exact: elastic`).

The micro batches of a step are its shards: with `global_batch` and `micro_batch` fixed, their number and their samples
do not depend on the number of workers. Random state belongs to the shard, and gradients are added up in the order of
shards: each worker adds up one part of the gradient over all shards, and then sends it to all workers. A plain
all-reduce adds in an order that follows the ranks, so its rounding depends on their number.

For each round of passes a step sends as much as an all-reduce, and waits for it: gradients are not exchanged during the
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from dtctl.runtime import randomness
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.step import Step
from dtctl.runtime.strategies.single import Single
from dtctl.train.compatibility import build_not_elastic_error
from dtctl.train.config import TrainConfig


def require_for(config: TrainConfig, model: nn.Module) -> None:
    """Refuse a model that would not have the same bits; `dtctl.train.compatibility` has checked the configuration.

    Raises:
        PlanError: the sizes of a batch or the model do not work with `exact: elastic`, with the reason.
    """
    if config.global_batch is None or config.micro_batch is None:
        raise build_not_elastic_error(
            "the shards follow from train.global_batch and train.micro_batch, which must both be set"
        )
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise build_not_elastic_error(
                f"{name} keeps running statistics, which depend on what else its worker has seen"
            )


class GradientShards:
    """Gradient of one step, added up shard by shard."""

    def __init__(self, model: nn.Module, parameters: Sequence[torch.Tensor], worker: Worker, seed: int) -> None:
        """Store the arguments, without allocating anything.

        Args:
            model: the model; its buffers must stay as they are.
            parameters: trained parameters, the same on all workers.
            worker: this worker.
            seed: seed of the run.
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
        """Set the random state of a shard."""
        if self._versions is None:
            self._versions = self._read_buffer_versions()
        randomness.seed_worker_generators(self._seed, shard, step=step)

    def _read_buffer_versions(self) -> list[tuple[int, int]]:
        held = (module._buffers[name] for _, module, name in self._buffers)
        return [(id(buffer), 0 if buffer is None else buffer._version) for buffer in held]

    def require_constant(self) -> None:
        """Refuse a buffer that changes in a pass, since its value would depend on the shards of its worker.

        Raises:
            PlanError: a buffer has changed.
        """
        now = self._read_buffer_versions()
        if now != self._versions:
            pairs = zip(self._buffers, now, self._versions or now, strict=True)
            changed = next(name for (name, _, _), is_now, was in pairs if is_now != was)
            raise build_not_elastic_error(
                f"the buffer {changed} changes in a training pass, depending on the samples of its worker"
            )

    def add(self) -> None:
        """Add the gradients of each worker's pass to the sums, in the order of ranks, and clear them; collective."""
        for index, some in enumerate(self._kinds):
            rows = self._exchange_vector_parts(_flatten_gradients(some))
            if len(self._sums) <= index:
                self._sums.append(rows[0].clone())
                rows = rows[1:]
            for row in rows:
                self._sums[index] += row
            for parameter in some:
                parameter.grad = None

    def finish(self) -> None:
        """Give every worker the complete sums as gradients; collective.

        A parameter without a gradient in any shard has none afterwards.
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

    def _exchange_vector_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return this worker's part of the vectors of all workers, in the order of ranks."""
        if self._worker.backend is None:
            return [flat]
        workers = self._worker.world_size
        flat = nn.functional.pad(flat, (0, -len(flat) % workers))
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        return list(received.chunk(workers))


def _flatten_gradients(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all gradients in one vector, with zeros for missing ones, followed by a 1 for each that exists."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = torch.tensor([p.grad is not None for p in parameters], dtype=parts[0].dtype, device=parts[0].device)
    return torch.cat([*(part.detach().reshape(-1) for part in parts), present])


class Elastic(Single):
    """The unmodified model, equal on all workers, whose gradients are added up in the order of shards."""

    name = "ddp, elastic"

    def __init__(self, model: nn.Module, worker: Worker, seed: int) -> None:
        """Give every worker rank 0's model.

        Args:
            model: the whole model on the worker's device; its buffers must stay as they are.
            worker: this worker.
            seed: seed of the run.
        """
        super().__init__(model)
        self._worker, self._seed = worker, seed
        self._shards: GradientShards | None = None
        if worker.backend is not None:
            for value in [*model.parameters(), *model.buffers()]:
                dist.broadcast(value.detach(), src=0)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the trained parameters."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._shards = GradientShards(self.module, parameters, self._worker, self._seed)

    def gradients(self, step: Step) -> torch.Tensor:
        """Run one shard after another, each with its own random numbers."""
        shards = self._shards
        assert shards is not None  # noqa: S101  # for the type checker: `prepare` comes first
        workers, losses = self._worker.world_size, []
        for index, indices in enumerate(step.micro_batches):
            shards.begin(step.number, index * workers + self._worker.rank)
            batch = step.read(index)
            losses.append(step.backward(self.module, batch, len(indices) / step.samples, len(indices)))
            if step.weights:
                raise build_not_elastic_error("the loss counts tokens, of which each worker has another number")
            shards.require_constant()
            shards.add()
        shards.finish()
        return torch.stack(losses).sum() * workers
