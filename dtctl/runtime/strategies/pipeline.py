"""Pipeline parallel: every worker has some blocks, and micro batches follow each other through them.

stages.py defines the requirements on a model, and cuts it; torch's schedules order the passes. The loss function is
called as usual, `loss(model, batch)`, on every stage, and must call the model once. Accumulation gives the micro
batches.

Replicas (dp) average their gradients after the last pass, which is right with every schedule; DDP is not (torch 2.13).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules

from dtctl.errors import PlanError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.json_collectives import filled, skeleton
from dtctl.runtime.step import Step
from dtctl.runtime.strategies import blocks, comparison, gradients, sharded, stages, tensor, trial, unused, whole_steps
from dtctl.train.compatibility import ONE_STAGE, stages_per_worker
from dtctl.train.config import PipelineConfig, TrainConfig
from dtctl.train.mesh import Degrees

SCHEDULES: Final[dict[str, Any]] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


class Pipeline:
    """Some blocks of a model; it is changed in place."""

    has_warm_up = False
    lockstep = True
    sharded_state = True

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        worker: Worker,
        degrees: Degrees,
        mesh: DeviceMesh,
        run: Callable[[], Any],
        seen: comparison.Seen | None = None,
    ) -> None:
        """Take this worker's part of a model.

        Args:
            model: whole, on the worker's device, the same everywhere.
            config: of the training.
            worker: this worker.
            degrees: of the mesh.
            mesh: with all axes.
            run: makes a forward pass of the whole model, to see what costs how much.
            seen: calls of `sharded.compared_modules`, with which what tp and ep divide is compared. None: nothing is.

        Raises:
            PlanError: the model cannot be cut so.
        """
        options = config.pipeline
        per_worker = stages_per_worker(config.pipeline)
        parts = blocks.find(model, config.blocks)
        if parts is None:
            raise PlanError(
                "a pipeline needs a model with a list of blocks", where="train.blocks", hint="name the list"
            )
        self.name = f"{degrees}, {options.schedule}"
        self.module, self._blocks = model, parts
        self._kind, self._single = SCHEDULES[options.schedule], options.schedule in ONE_STAGE
        self._degrees, self._mesh, self._worker = degrees, mesh, worker
        self.sizes = sizes_of(options, degrees.pp * per_worker, *stages.costs(parts, run))
        state, names = set(model.state_dict()), [name for name, _ in model.named_parameters()]
        if degrees.tp > 1:
            tensor.split(model, parts, config.tp, mesh["tp"], seen)
        self._outside = outside(model, parts, self.sizes)
        in_blocks = {parameter for block in parts.modules for parameter in block.parameters()}
        if degrees.shards > 1 and not in_blocks.isdisjoint(self._outside):
            raise PlanError(
                "blocks on several stages share parameters, which fully_shard cannot divide",
                where="train.strategy",
                hint="use dp instead of fsdp",
            )
        experts = sharded.spread_experts(model, degrees, worker, mesh, seen) if degrees.ep > 1 else None
        self.owners = owners(options.schedule, degrees.pp, per_worker)
        self._stages = self._take(model, parts)
        self.absent_keys: Collection[str] = frozenset(state - set(model.state_dict()))
        if degrees.data > 1:
            sharded.keep_buffers_alike(model, mesh)
        self.present: unused.Present | None = None
        if degrees.shards > 1:
            for stage in self._stages.values():
                sharded.shard_blocks(stage, stage.cut.blocks, config, worker, mesh, experts=experts)
            self.present = unused.Present(model, list(self._stages.values()), names)
        shared = set(self._outside)
        self._own = [parameter for parameter in gradients.wanted(model) if parameter not in shared]
        self.inference: nn.Module = Inference(self._stages, self.owners, mesh["pp"])
        self._schedule: Any = None
        self._scheduled_for: tuple[int, int | None] = (0, 0)

    def _take(self, model: nn.Module, parts: blocks.Blocks) -> dict[int, stages.Stage]:
        """This worker's stages by their numbers; blocks of others are given up."""
        mine = [number for number, owner in enumerate(self.owners) if owner == self._mesh["pp"].get_local_rank()]
        ends = list(accumulate(self.sizes))
        cuts = {number: stages.Cut(model, parts, ends[number] - self.sizes[number], ends[number]) for number in mine}
        own_indexes = {index for number in mine for index in range(ends[number] - self.sizes[number], ends[number])}
        for index in set(range(len(parts))) - own_indexes:
            parts.container[index] = stages.Elsewhere()
        return {number: stages.Stage(cut, self._outside) for number, cut in cuts.items()}

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Give tensors of each mesh a group of their own, since fused optimizers do not mix them."""
        sharded.separate_meshes(optimizer)
        whole_steps.take_whole_steps(optimizer)

    def state(self) -> Mapping[str, Any]:
        """Nothing of its own."""
        return {}

    def release(self) -> None:
        """Do nothing yet: there is no other worker to take a sharded state from."""

    def discard(self) -> None:
        """Nothing is carried over."""

    def load_state(self, tree: Mapping[str, Any]) -> str | None:
        """Nothing of its own."""

    def gradients(self, step: Step) -> torch.Tensor:
        """Return all micro batches in the order of the schedule."""
        scale, weighed = step.scale, []
        for index, indices in enumerate(step.micro_batches):
            weight = scale * len(indices) * step.replicas / step.samples
            weighed.append(((step.read(index), len(indices), weight), weight))
        total = self._run(weighed, lambda model, part: step.loss(model, *part), step.batch.micro) / scale
        # Only workers with the last stage have seen whether losses have weights; all take part in adding them up.
        if float(self._worker.sum(torch.tensor(float(len(step.weights))))) and not step.weights:
            step.weights.append(torch.zeros((), device=total.device))
        return total

    def finish(self) -> None:
        """Add up the gradients that are on all stages, and average over replicas those that fully_shard does not."""
        gradients.add_up(self._outside, self._mesh["pp"].get_group())
        if self._degrees.data > 1:
            replicated = self._outside if self._degrees.shards > 1 else [*self._outside, *self._own]
            gradients.add_up(replicated, sharded.data_group(self._mesh), divide_by=self._degrees.data)

    def try_gradients(self, probe: trial.Probe) -> None:
        """Compute the gradients of one batch as a step does, without dropout; collective.

        Each micro batch is that batch, and there are as few as a schedule takes.

        Args:
            probe: computes the loss of the batch.
        """
        count = self._degrees.pp
        with comparison.evaluating(self.module), torch.enable_grad():
            self._run([(None, 1.0)] * count, lambda model, _: probe(model), None)
            self.finish()
        for parameter in gradients.wanted(self.module):
            if parameter.grad is not None:
                parameter.grad /= count

    def _run(self, batches: Sequence[stages.Batch], loss: stages.Loss, samples: int | None) -> torch.Tensor:
        """Return all passes of a step, without the exchange of gradients.

        Args:
            batches: the micro batches of this worker's part of the global batch, with the weights of their losses.
            loss: of the user.
            samples: of a whole micro batch; shorter ones are filled up on the way. None: all have the same number.

        Returns:
            The sum of weighted losses such that its mean over all workers is the loss of the global batch.
        """
        if self._scheduled_for != (len(batches), samples):
            self._schedule = self._scheduled(self._shape(batches[0][0], loss, samples), len(batches))
            self._scheduled_for = (len(batches), samples)
        for stage in self._stages.values():
            stage.train_on(batches, loss, samples)
        index = torch.arange(len(batches))  # on the CPU: a GPU would have to be waited for to read it
        losses: list[torch.Tensor] = []
        first = (index,) if 0 in self._stages else ()
        self._schedule.step(*first, target=index, losses=losses, return_outputs=False, index=index)
        if not losses:
            return torch.zeros((), device=self._worker.device)
        return torch.stack([value.detach() for value in losses]).sum() * self._degrees.pp

    def _shape(self, batch: Any, loss: stages.Loss, samples: int | None) -> torch.Tensor:
        """Return an empty tensor like the stream between stages: what the model hands to its first block."""
        probe = stages.Cut(self.module, self._blocks, 0, 0)
        was_training = self.module.training
        self.module.eval()  # so that no random number is drawn and no running mean moved
        try:
            with torch.no_grad():
                loss(stages.Caller(probe, samples), batch)
        except stages.Reached as reached:
            return torch.empty_like(reached.stream).requires_grad_()
        finally:
            self.module.train(was_training)
        raise PlanError("the loss function does not call the model", where="the loss function of the Trainer")

    def _scheduled(self, stream: torch.Tensor, micro_batches: int) -> Any:
        """Return the schedule over this worker's stages, for streams of one shape."""
        device, last = self._worker.device, len(self.owners) - 1
        number, scalar = torch.zeros(1, dtype=torch.int64), torch.zeros((), device=device)
        schedule_stages = [
            PipelineStage(
                stage,
                index,
                len(self.owners),
                device,
                input_args=stream if index else number,
                output_args=stream if index < last else scalar,
                group=self._mesh["pp"].get_group(),
            )
            for index, stage in self._stages.items()
        ]
        return self._kind(
            schedule_stages[0] if self._single else schedule_stages,
            n_microbatches=micro_batches,
            loss_fn=lambda output, _: output,  # the last stage has called the loss function
            scale_grads=False,
        )

    def norm(self) -> torch.Tensor:
        """Return the length of the gradient over all stages and shards; collective."""
        squared = gradients.norm(self._own).double().to(self._worker.device) ** 2
        dist.all_reduce(squared, group=self._mesh["pp"].get_group())
        shared = gradients.norm(self._outside).double().to(self._worker.device)
        return (squared + shared**2).sqrt()

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradient down if it is too long."""
        gradients.clip([*self._own, *self._outside], max_norm, norm)


class Inference(nn.Module):
    """A pipeline that is called like the model, without gradients, and gives its result to all workers of it."""

    numbered: Mapping[int, stages.Stage]

    def __init__(self, own_stages: Mapping[int, stages.Stage], owners: Sequence[int], mesh: DeviceMesh) -> None:
        super().__init__()
        self.stages = nn.ModuleList(own_stages.values())
        self.__dict__["numbered"] = dict(own_stages)
        self.owners, self.group, self.rank = owners, mesh.get_group(), mesh.get_local_rank()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns: tensors, in dicts and lists."""
        last_output: torch.Tensor | None = None
        result: Any = None
        for number, stage in self.numbered.items():
            before = self.owners[number - 1] if number else None
            if before is not None:
                stage.cut.entrance.source = self._receiving(before, last_output)
            stage.task = lambda *_, stage=stage: stage.cut(*args, **kwargs)
            result = stage()
            if number + 1 < len(self.owners):
                last_output = result
                if self.owners[number + 1] != self.rank:
                    dist.send(result.contiguous(), group_dst=self.owners[number + 1], group=self.group)
        return self._given(result)

    def _receiving(self, before: int, last_output: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        def source(like: torch.Tensor) -> torch.Tensor:
            if before == self.rank and last_output is not None:
                return last_output
            stream = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            dist.recv(stream, group_src=before, group=self.group)
            return stream

        return source

    def _given(self, result: Any) -> Any:
        """Return the last stage's result, on every worker of the pipeline."""
        owner = self.owners[-1]
        tensors: list[torch.Tensor] = []
        text = b""
        if self.rank == owner:
            outline = skeleton(result, tensors)
            shapes = [[str(value.dtype).removeprefix("torch."), list(value.shape)] for value in tensors]
            text = json.dumps({"skeleton": outline, "tensors": shapes}).encode()
        size = torch.tensor([len(text)])
        dist.broadcast(size, group_src=owner, group=self.group)
        packed = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(packed, group_src=owner, group=self.group)
        header = json.loads(packed.numpy().tobytes())
        if self.rank != owner:
            device = next(iter(self.numbered.values())).cut.device
            tensors = [
                torch.empty(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in header["tensors"]
            ]
        tensors = [value.contiguous() for value in tensors]
        for value in tensors:
            dist.broadcast(value, group_src=owner, group=self.group)
        return result if self.rank == owner else filled(header["skeleton"], tensors)


def sizes_of(options: PipelineConfig, count: int, costs: Sequence[int], after: int) -> list[int]:
    """Blocks of each stage.

    Raises:
        PlanError: the split that was asked for does not fit the model.
    """
    if options.split is None:
        return stages.balanced(costs, after, count)
    if len(options.split) != count or sum(options.split) != len(costs) or min(options.split) < 1:
        raise PlanError(
            f"the split {list(options.split)} does not put {len(costs)} blocks on {count} stages",
            where="train.pipeline.split",
            hint=f"balanced by cost it is {stages.balanced(costs, after, count)}",
        )
    return list(options.split)


def owners(schedule: str, workers: int, per_worker: int) -> list[int]:
    """Return which worker of the pipeline has which stage: round and round, or there and back (zbv)."""
    in_order = list(range(workers))
    return in_order + in_order[::-1] if schedule == "zbv" else in_order * per_worker


def outside(model: nn.Module, parts: blocks.Blocks, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The parameters that are trained and do not belong to one stage alone: outside of blocks, or in several stages."""
    uses: dict[torch.Tensor, set[int]] = {}
    starts = [0, *accumulate(sizes)]
    for stage, (first, last) in enumerate(pairwise(starts)):
        for block in parts.modules[first:last]:
            for parameter in block.parameters():
                uses.setdefault(parameter, set()).add(stage)
    inside = {id(module) for block in parts.modules for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                uses.setdefault(parameter, set()).add(-1)
    return [p for p in gradients.wanted(model) if uses[p] == {-1} or len(uses[p]) > 1]
