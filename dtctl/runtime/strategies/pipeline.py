"""Pipeline parallel: every worker has some blocks, and micro batches pass through them one after another.

stages.py defines the requirements on a model, and cuts it; torch's schedules order the passes. The loss function is
called as usual, `loss(model, batch)`, on every stage, and must call the model once. The micro batches are those of
gradient accumulation.

Replicas (dp) average their gradients after the last pass, which is right with every schedule, unlike DDP (torch 2.13).
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
from dtctl.runtime.snapshot.json_collectives import merge_tree_tensors, split_tree_tensors
from dtctl.runtime.step import Step
from dtctl.runtime.strategies import blocks, comparison, gradients, sharded, stages, tensor, trial, unused, whole_steps
from dtctl.runtime.strategies.single import StatelessStrategy
from dtctl.train.compatibility import ONE_STAGE, count_stages_per_worker
from dtctl.train.config import PipelineConfig, TrainConfig
from dtctl.train.mesh import Degrees

SCHEDULES: Final[dict[str, Any]] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


class Pipeline(StatelessStrategy):
    """This worker's blocks of a model, which is changed in place."""

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
        seen: comparison.RecordedCalls | None = None,
    ) -> None:
        """Cut this worker's stages out of a model.

        Args:
            model: the whole model on the worker's device, the same everywhere.
            config: settings of the run.
            worker: this worker.
            degrees: degrees of the mesh.
            mesh: mesh with all axes.
            run: makes a forward pass of the whole model, to measure the cost of each block.
            seen: calls of `sharded.list_compared_modules`, with which the modules that tp and ep divide are compared.
                None: no comparison.

        Raises:
            PlanError: the model cannot be cut in this way.
        """
        options = config.pipeline
        per_worker = count_stages_per_worker(config.pipeline)
        parts = blocks.find_repeated_blocks(model, config.blocks)
        if parts is None:
            raise PlanError(
                "a pipeline needs a model with a list of blocks", where="train.blocks", hint="name the list"
            )
        self.name = f"{degrees}, {options.schedule}"
        self.module, self._blocks = model, parts
        self._kind, self._single = SCHEDULES[options.schedule], options.schedule in ONE_STAGE
        self._degrees, self._mesh, self._worker = degrees, mesh, worker
        self.sizes = choose_stage_sizes(options, degrees.pp * per_worker, *stages.count_block_flops(parts, run))
        state, names = set(model.state_dict()), [name for name, _ in model.named_parameters()]
        if degrees.tp > 1:
            tensor.split_model_matrices(model, parts, config.tp, mesh["tp"], seen)
        self._outside = list_cross_stage_parameters(model, parts, self.sizes)
        in_blocks = {parameter for block in parts.modules for parameter in block.parameters()}
        if degrees.shards > 1 and not in_blocks.isdisjoint(self._outside):
            raise PlanError(
                "blocks on several stages share parameters, which fully_shard cannot divide",
                where="train.strategy",
                hint="use dp instead of fsdp",
            )
        experts = sharded.spread_experts(model, degrees, worker, mesh, seen) if degrees.ep > 1 else None
        self.owners = assign_stage_owners(options.schedule, degrees.pp, per_worker)
        self._stages = self._build_own_stages(model, parts)
        self.absent_keys: Collection[str] = frozenset(state - set(model.state_dict()))
        if degrees.data > 1:
            sharded.keep_buffers_alike(model, mesh)
        self.present: unused.UsedParameters | None = None
        if degrees.shards > 1:
            for stage in self._stages.values():
                sharded.shard_blocks(stage, stage.cut.blocks, config, worker, mesh, experts=experts)
            self.present = unused.UsedParameters(model, list(self._stages.values()), names)
        shared = set(self._outside)
        self._own = [parameter for parameter in gradients.list_trained_parameters(model) if parameter not in shared]
        self.inference: nn.Module = PipelineInference(self._stages, self.owners, mesh["pp"])
        self._schedule: Any = None
        self._scheduled_for: tuple[int, int | None] = (0, 0)

    def _build_own_stages(self, model: nn.Module, parts: blocks.RepeatedBlocks) -> dict[int, stages.StageModule]:
        """Return this worker's stages by their numbers, and free the blocks of others."""
        mine = [number for number, owner in enumerate(self.owners) if owner == self._mesh["pp"].get_local_rank()]
        ends = list(accumulate(self.sizes))
        cuts = {
            number: stages.StageModel(model, parts, ends[number] - self.sizes[number], ends[number]) for number in mine
        }
        own_indexes = {index for number in mine for index in range(ends[number] - self.sizes[number], ends[number])}
        for index in set(range(len(parts))) - own_indexes:
            parts.container[index] = stages.RemoteBlock()
        return {number: stages.StageModule(cut, self._outside) for number, cut in cuts.items()}

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Split parameter groups by mesh, since fused optimizers do not mix tensors of several meshes."""
        sharded.separate_meshes(optimizer)
        whole_steps.take_whole_steps(optimizer)

    def release(self) -> None:
        """Do nothing: no replacement can take over a sharded state of a pipeline."""

    def gradients(self, step: Step) -> torch.Tensor:
        """Run all micro batches in the order of the schedule."""
        scale, weighed = step.scale, []
        for index, indices in enumerate(step.micro_batches):
            weight = scale * len(indices) * step.replicas / step.samples
            weighed.append(((step.read(index), len(indices), weight), weight))
        total = (
            self._run_pipeline_passes(weighed, lambda model, part: step.loss(model, *part), step.batch.micro) / scale
        )
        # Only workers with the last stage know whether losses have weights, but all take part in adding them up.
        if float(self._worker.sum(torch.tensor(float(len(step.weights))))) and not step.weights:
            step.weights.append(torch.zeros((), device=total.device))
        return total

    def finish(self) -> None:
        """Add up gradients of parameters on all stages; average over replicas what fully_shard does not average."""
        gradients.sum_gradients_over_group(self._outside, self._mesh["pp"].get_group())
        if self._degrees.data > 1:
            replicated = self._outside if self._degrees.shards > 1 else [*self._outside, *self._own]
            gradients.sum_gradients_over_group(
                replicated, sharded.find_data_group(self._mesh), divide_by=self._degrees.data
            )

    def try_gradients(self, probe: trial.Probe) -> None:
        """Compute the gradients of one batch as a step does, without dropout; collective.

        Each micro batch is that batch, and there are as few of them as the schedule accepts.

        Args:
            probe: computes the loss of the batch.
        """
        count = self._degrees.pp
        with comparison.set_evaluation_mode(self.module), torch.enable_grad():
            self._run_pipeline_passes([(None, 1.0)] * count, lambda model, _: probe(model), None)
            self.finish()
        for parameter in gradients.list_trained_parameters(self.module):
            if parameter.grad is not None:
                parameter.grad /= count

    def _run_pipeline_passes(
        self, batches: Sequence[stages.Batch], loss: stages.Loss, samples: int | None
    ) -> torch.Tensor:
        """Run all passes of a step, without the exchange of gradients.

        Args:
            batches: the micro batches of this worker's part of the global batch, with the weights of their losses.
            loss: the user's loss function.
            samples: samples of a whole micro batch, to which shorter ones are filled up. None: all have the same
                number.

        Returns:
            Sum of weighted losses, whose mean over all workers is the loss of the global batch.
        """
        if self._scheduled_for != (len(batches), samples):
            self._schedule = self._build_pipeline_schedule(
                self._probe_stream_shape(batches[0][0], loss, samples), len(batches)
            )
            self._scheduled_for = (len(batches), samples)
        for stage in self._stages.values():
            stage.train_on(batches, loss, samples)
        index = torch.arange(len(batches))  # on the CPU, since reading it from a GPU would wait for its kernels
        losses: list[torch.Tensor] = []
        first = (index,) if 0 in self._stages else ()
        self._schedule.step(*first, target=index, losses=losses, return_outputs=False, index=index)
        if not losses:
            return torch.zeros((), device=self._worker.device)
        return torch.stack([value.detach() for value in losses]).sum() * self._degrees.pp

    def _probe_stream_shape(self, batch: Any, loss: stages.Loss, samples: int | None) -> torch.Tensor:
        """Return an empty tensor of the shape of the stream between stages, that of the first block's input."""
        probe = stages.StageModel(self.module, self._blocks, 0, 0)
        was_training = self.module.training
        self.module.eval()  # evaluation mode draws no random numbers and changes no running means
        try:
            with torch.no_grad():
                loss(stages.StageCaller(probe, samples), batch)
        except stages.StageEndReached as reached:
            return torch.empty_like(reached.stream).requires_grad_()
        finally:
            self.module.train(was_training)
        raise PlanError("the loss function does not call the model", where="the loss function of the Trainer")

    def _build_pipeline_schedule(self, stream: torch.Tensor, micro_batches: int) -> Any:
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
            loss_fn=lambda output, _: output,  # the last stage has already called the loss function
            scale_grads=False,
        )

    def norm(self) -> torch.Tensor:
        """Return the norm of the gradient over all stages and shards; collective."""
        squared = gradients.compute_gradient_norm(self._own).double().to(self._worker.device) ** 2
        dist.all_reduce(squared, group=self._mesh["pp"].get_group())
        shared = gradients.compute_gradient_norm(self._outside).double().to(self._worker.device)
        return (squared + shared**2).sqrt()

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradient down if its norm exceeds the limit."""
        gradients.clip_gradients([*self._own, *self._outside], max_norm, norm)


class PipelineInference(nn.Module):
    """Pipeline that is called like the model, without gradients, and returns its result on all of its workers."""

    numbered: Mapping[int, stages.StageModule]

    def __init__(self, own_stages: Mapping[int, stages.StageModule], owners: Sequence[int], mesh: DeviceMesh) -> None:
        super().__init__()
        self.stages = nn.ModuleList(own_stages.values())
        self.__dict__["numbered"] = dict(own_stages)
        self.owners, self.group, self.rank = owners, mesh.get_group(), mesh.get_local_rank()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the model: tensors, in dicts and lists."""
        last_output: torch.Tensor | None = None
        result: Any = None
        for number, stage in self.numbered.items():
            before = self.owners[number - 1] if number else None
            if before is not None:
                stage.cut.entrance.source = self._make_stream_receiver(before, last_output)
            stage.task = lambda *_, stage=stage: stage.cut(*args, **kwargs)
            result = stage()
            if number + 1 < len(self.owners):
                last_output = result
                if self.owners[number + 1] != self.rank:
                    dist.send(result.contiguous(), group_dst=self.owners[number + 1], group=self.group)
        return self._broadcast_last_result(result)

    def _make_stream_receiver(
        self, before: int, last_output: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def source(like: torch.Tensor) -> torch.Tensor:
            if before == self.rank and last_output is not None:
                return last_output
            stream = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            dist.recv(stream, group_src=before, group=self.group)
            return stream

        return source

    def _broadcast_last_result(self, result: Any) -> Any:
        """Return the last stage's result on every worker of the pipeline."""
        owner = self.owners[-1]
        tensors: list[torch.Tensor] = []
        text = b""
        if self.rank == owner:
            outline = split_tree_tensors(result, tensors)
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
        return result if self.rank == owner else merge_tree_tensors(header["skeleton"], tensors)


def choose_stage_sizes(options: PipelineConfig, count: int, costs: Sequence[int], after: int) -> list[int]:
    """Return the number of blocks in each stage.

    Raises:
        PlanError: the configured split does not fit the model.
    """
    if options.split is None:
        return stages.balance_stage_sizes(costs, after, count)
    if len(options.split) != count or sum(options.split) != len(costs) or min(options.split) < 1:
        raise PlanError(
            f"the split {list(options.split)} does not put {len(costs)} blocks on {count} stages",
            where="train.pipeline.split",
            hint=f"balanced by cost it is {stages.balance_stage_sizes(costs, after, count)}",
        )
    return list(options.split)


def assign_stage_owners(schedule: str, workers: int, per_worker: int) -> list[int]:
    """Return the worker of the pipeline for each stage: in cycles, or forth and back (zbv)."""
    in_order = list(range(workers))
    return in_order + in_order[::-1] if schedule == "zbv" else in_order * per_worker


def list_cross_stage_parameters(
    model: nn.Module, parts: blocks.RepeatedBlocks, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Return the trained parameters that are outside of blocks or in several stages."""
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
    return [p for p in gradients.list_trained_parameters(model) if uses[p] == {-1} or len(uses[p]) > 1]
