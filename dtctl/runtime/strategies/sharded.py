"""Sharded data parallel (ZeRO 2 and 3) by torch's `fully_shard`, tensor, context and expert parallel, and all together.

Each block of the model is sharded by itself, so that only one or two are whole at a time; what is outside of blocks is
one group more. On a mesh of replicas and shards (hsdp) gradients are added up inside a replica first. With tp the
matrices are split before that, and with ep the experts (moe/divide.py).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from dtctl.errors import PlanError
from dtctl.runtime.distributed.device_mesh import context_group, device_mesh, expert_mesh
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.moe import divide, recognize
from dtctl.runtime.moe.layer import MoE
from dtctl.runtime.step import Step
from dtctl.runtime.strategies import (
    blocks,
    comparison,
    context,
    deferred_init,
    gradients,
    regroup,
    tensor,
    unused,
    whole_steps,
)
from dtctl.runtime.strategies.accumulation import accumulate
from dtctl.train.config import FsdpConfig, TrainConfig
from dtctl.train.mesh import Degrees


class Sharded:
    """A model whose parameters are DTensors; it is changed in place."""

    has_warm_up = False
    lockstep = True
    absent_keys: Collection[str] = ()
    sharded_state = True

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        worker: Worker,
        degrees: Degrees,
        mesh: DeviceMesh,
        seen: comparison.Seen | None = None,
    ) -> None:
        """Spread a model.

        Args:
            model: those of all workers become rank 0's. With tp, cp and ep whole, alike, and on the worker's device.
            config: of the training.
            worker: this worker.
            degrees: of the mesh; pp is 1.
            mesh: with all axes.
            seen: calls of `compared_modules`, by which every module that is divided is compared with itself in one
                piece. None: nothing is compared.

        Raises:
            PlanError: an option needs another device, or the model cannot be split, or a part of it computes something
                else then.
        """
        hush()
        self.name = str(degrees)
        self._replaces = worker.replaces
        self.module = self.inference = model
        self._mesh = mesh
        self._shares_buffers = degrees.data * degrees.cp > 1 and _has_kept_buffers(model)
        if self._shares_buffers:
            data_group(mesh)  # before anything is changed: to make a group can fail
        found = blocks.find(model, config.blocks)
        group = context_group(degrees, worker.device.type) if degrees.cp > 1 else None
        if group is not None and seen is not None:
            context.require_equal(found, group, seen)
        if degrees.tp > 1:
            tensor.split(model, found, config.tp, mesh["tp"], seen)
        if group is not None:
            divided = context.divide(found, group)
            for part in model.modules():
                if isinstance(part, MoE):
                    part.sequence = divided
        self._experts = spread_experts(model, degrees, worker, mesh, seen) if degrees.ep > 1 else None
        self.present: unused.Present | None = None
        self._turns: unused.Turns | None = None
        if degrees.data * degrees.cp > 1:
            in_turns = degrees.cp == degrees.ep == 1
            self._turns = shard(model, config, worker, mesh, in_turns=in_turns, experts=self._experts)
            self.present = unused.Present(model, [model], [name for name, _ in model.named_parameters()])
            keep_buffers_alike(model, mesh)
        self._wanted = gradients.wanted(model)
        self._every_pass = config.fsdp.exchange_every_pass

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Give tensors of each mesh a group of their own, since fused optimizers do not mix them; collective."""
        separate_meshes(optimizer)
        # The others are in the middle of a training, and do not take part in a trial; see live.recovery.obstacle.
        if not self._replaces:
            whole_steps.take_whole_steps(optimizer)

    def gradients(self, step: Step) -> torch.Tensor:
        """Micro batch by micro batch; those before the last are added up whole on each worker, or sharded as well."""
        beside = tuple if self._turns is None else self._turns.ends  # of blocks that this worker has left out
        return accumulate(step, self.module, local=self._local, beside=beside)

    @contextmanager
    def _local(self) -> Iterator[None]:
        """Gradients are neither exchanged nor sharded."""
        sharded = self.module if isinstance(self.module, FSDPModule) and not self._every_pass else None
        if sharded is not None:
            sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if sharded is not None:
                sharded.set_requires_gradient_sync(True)

    def state(self) -> Mapping[str, Any]:
        """Nothing of its own."""
        return {}

    def release(self) -> None:
        """Forget the pass that is under way; shards stay."""
        if isinstance(self.module, FSDPModule):
            regroup.interrupt(self.module)
        if self._turns is not None:
            self._turns.forget()

    def rejoin(self, worker: Worker, degrees: Degrees) -> None:
        """Go on in new process groups with the shards of now; collective, with workers that are new to it.

        They make theirs in the same order, all before anything is changed. Without tp and cp, which have others.
        """
        mesh = device_mesh(degrees, worker.device.type)
        if self._shares_buffers:
            data_group(mesh)
        meshes = [(self._mesh, mesh)]
        if self._experts is not None:
            meshes.append((self._experts.mesh, expert_mesh(degrees, worker.device.type)))
        regroup.replace(meshes)
        regroup.join(self.module)
        if self._experts is not None:
            divide.join(self._experts.modules)

    def discard(self) -> None:
        """Nothing is carried over."""

    def load_state(self, tree: Mapping[str, Any]) -> str | None:
        """Nothing of its own."""

    def finish(self) -> None:
        """Nothing is left to be done."""

    def norm(self) -> torch.Tensor:
        """Return the length of the gradient over all shards; collective."""
        return gradients.norm(self._wanted)

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradient down if it is too long."""
        gradients.clip(self._wanted, max_norm, norm)


def hush() -> None:
    """Silence two warnings of torch 2.13 that come with every use and ask for nothing."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Putting together what is sharded over two axes takes two exchanges, which is known and happens in snapshots only.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def begin_alike(model: nn.Module) -> None:
    """Give every worker rank 0's parameters and buffers, as DDP does when it wraps a model."""
    for value in [*model.parameters(), *model.buffers()]:
        dist.broadcast(value.detach(), src=0)


@dataclass(frozen=True, slots=True)
class SpreadExperts:
    """Modules of a model that hold experts; each worker has a part of the experts."""

    modules: Sequence[nn.Module]
    mesh: DeviceMesh
    """Mesh that `expert_mesh` returns."""

    @property
    def over(self) -> DeviceMesh | None:
        """The workers that have the same experts; None if there is one."""
        over = self.mesh["dp", "fsdp"] if "dp" in (self.mesh.mesh_dim_names or ()) else self.mesh["fsdp"]
        return over if over.size() > 1 else None


def compared_modules(model: nn.Module, config: TrainConfig, degrees: Degrees) -> list[str]:
    """Return the names of the modules that are compared, or may be, before they are divided over tp, cp and ep.

    Raises:
        PlanError: they cannot be divided so.
    """
    found = blocks.find(model, config.blocks)
    names: list[str] = []
    if degrees.tp > 1:
        names += tensor.compared_modules(tensor.choose_split(model, found, config.tp, degrees.tp))
    if degrees.cp > 1 and found is not None:
        names += found.names
    if degrees.ep > 1:
        names += recognize.find(model)
    return list(dict.fromkeys(names))


def spread_experts(
    model: nn.Module, degrees: Degrees, worker: Worker, mesh: DeviceMesh, seen: comparison.Seen | None = None
) -> SpreadExperts:
    """Divide a model's experts over the axes ep and tp; collective over all workers.

    Args:
        model: changed in place.
        degrees: of the mesh.
        worker: this worker.
        mesh: with all axes.
        seen: calls of the experts, with which they are compared. None: nothing is compared.

    Raises:
        PlanError: it has none, or a number that the workers cannot divide, or they compute something else then.
    """
    apart = expert_mesh(degrees, worker.device.type)
    alike = mesh["tp"].get_group() if degrees.tp > 1 else None
    if seen is not None:
        divide.require_equal(model, apart, alike, seen)
    return SpreadExperts(divide.divide(model, apart, alike), apart)


def shard(
    model: nn.Module,
    config: TrainConfig,
    worker: Worker,
    mesh: DeviceMesh,
    *,
    in_turns: bool,
    experts: SpreadExperts | None = None,
) -> unused.Turns | None:
    """Apply `fully_shard` to each block and to what is left, over the axes dp and fsdp.

    Args:
        model: changed in place.
        config: of the training.
        worker: this worker.
        mesh: with all axes.
        in_turns: whether workers may leave out blocks, each its own; then there is something that keeps their order.
        experts: that are divided over workers.

    Raises:
        PlanError: offloading was asked for where there is no accelerator, or a block shares parameters with what is
            outside of it, which fully_shard would part without a word (torch 2.13).
    """
    found = blocks.find(model, config.blocks)
    blocks.require_apart(model, found.modules if found else [])
    bring = partial(deferred_init.bring, model=model, worker=worker)
    turns: list[unused.Turns] = []

    def between(units: Sequence[nn.Module]) -> None:
        if in_turns:
            turns.append(unused.Turns(model, units))

    shard_blocks(
        model, found.modules if found else [], config, worker, mesh, first=bring, between=between, experts=experts
    )
    model.register_forward_hook(_shard_again)
    return turns[0] if turns else None


def shard_blocks(
    root: nn.Module,
    modules: Sequence[nn.Module],
    config: TrainConfig,
    worker: Worker,
    mesh: DeviceMesh,
    *,
    first: Callable[[nn.Module], None] = lambda _: None,
    between: Callable[[Sequence[nn.Module]], None] = lambda _: None,
    experts: SpreadExperts | None = None,
) -> None:
    """Apply `fully_shard` to some modules and then to the one that has them.

    Args:
        root: which has the modules.
        modules: to be sharded each by itself.
        config: of the training.
        worker: this worker.
        mesh: with all axes.
        first: called with each of them before.
        between: called with those modules that have parameters, before the root is sharded.
        experts: that are divided over workers; those in the root are sharded over the workers that have the same.

    Raises:
        PlanError: as `shard`.
    """
    options = config.fsdp
    # Two axes mean replicas of shards; with one replica, one axis is the cheaper equivalent.
    over = mesh["dp", "fsdp"] if "dp" in (mesh.mesh_dim_names or ()) else mesh["fsdp"]
    policy, offload = precision(options), offloading(options, worker)
    apart: set[nn.Parameter] = set()
    if experts is not None:
        inside = set(root.modules())
        apart = _shard_experts(
            SpreadExperts([m for m in experts.modules if m in inside], experts.mesh), options, worker
        )
    units = [block for block in modules if any(True for _ in block.parameters())]
    for block in modules:
        first(block)
        if block in units:
            block.register_forward_hook(_without_views)
            fully_shard(
                block,
                mesh=over,
                reshard_after_forward=options.reshard_after_forward,
                mp_policy=policy,
                offload_policy=offload,
                ignored_params=apart,
            )
    first(root)
    between(units)
    whole = fully_shard(root, mesh=over, mp_policy=policy, offload_policy=offload, ignored_params=apart)
    if unused.ZEROS:
        whole.set_reduce_scatter_unused_params(True)


def _without_views(_: nn.Module, __: Any, output: Any) -> Any:
    """Give on copies of what a block has made as views.

    fully_shard hangs what gathers parameters for the backward pass on a block's output, and torch loses that if the
    output is a view and code after the block changes it in place (torch 2.13).
    """
    if isinstance(output, torch.Tensor):
        return output.clone() if output._is_view() else output
    return tree_map_only(torch.Tensor, lambda value: value.clone() if value._is_view() else value, output)


def _shard_experts(experts: SpreadExperts, options: FsdpConfig, worker: Worker) -> set[nn.Parameter]:
    """Shard experts over the workers that have the same ones.

    Returns:
        The parameters of experts, if no other worker has the same: then there is nothing to be exchanged.
    """
    if experts.over is None:
        return {parameter for module in experts.modules for parameter in module.parameters()}
    for module in experts.modules:
        fully_shard(
            module,
            mesh=experts.over,
            reshard_after_forward=options.reshard_after_forward,
            shard_placement_fn=divide.placement(experts.mesh),
            mp_policy=precision(options),
            offload_policy=offloading(options, worker),
        )
    return set()


def _shard_again(model: nn.Module, *_: Any) -> None:
    """Give whole parameters up after a pass without a backward pass.

    fully_shard leaves some whole after a forward pass, and `model.parameters()` then has other tensors than the
    optimizer.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def precision(options: FsdpConfig) -> MixedPrecisionPolicy:
    """Return the formats of gathered parameters and of summed gradients; fp32 means the parameters' own."""
    half = options.param_dtype == "bf16"
    own = torch.float32 if half else None  # else gradients would be added up in the format of what was gathered
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None,
        reduce_dtype=torch.bfloat16 if options.reduce_dtype == "bf16" else own,
    )


def offloading(options: FsdpConfig, worker: Worker) -> OffloadPolicy:
    """Return where shards are kept.

    Raises:
        PlanError: in the host's memory, and there is no accelerator.
    """
    if not options.cpu_offload:
        return OffloadPolicy()
    if worker.device.type == "cpu":
        raise PlanError(
            "shards can be kept in the host's memory only if there is a GPU to bring them to",
            where="train.fsdp.cpu_offload",
            hint="leave it out: on CPUs everything is in the host's memory",
        )
    return CPUOffloadPolicy()


def keep_buffers_alike(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every worker the first one's buffers before each training pass, as DDP does.

    Only those that snapshots have: running means of BatchNorm, which every worker would else have of its own samples.
    """
    if not _has_kept_buffers(model):
        return
    state = model.state_dict(keep_vars=True)

    def bring(module: nn.Module, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            group = data_group(mesh)  # of now: another one after a lost worker was replaced
            source = dist.get_global_rank(group, 0)
            for name, buffer in model.named_buffers():
                if name in state and not isinstance(buffer, DTensor):
                    dist.broadcast(buffer, src=source, group=group)

    model.register_forward_pre_hook(bring, prepend=True)


def _has_kept_buffers(model: nn.Module) -> bool:
    """Return whether snapshots have buffers of the model."""
    state = model.state_dict(keep_vars=True)
    return any(name in state for name, _ in model.named_buffers())


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the workers that have the same part of the model and other samples."""
    over = mesh["dp", "fsdp"]._flatten("data") if "dp" in (mesh.mesh_dim_names or ()) else mesh["fsdp"]
    return over.get_group()


def separate_meshes(optimizer: torch.optim.Optimizer) -> None:
    """Split parameter groups such that each has tensors of one mesh only, and disable what DTensors cannot do."""
    split = []
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and any(isinstance(value, DTensor) for value in group["params"]):
            group["fused"] = False  # torch 2.13: aten._fused_sgd_ has no sharding strategy; AdamW's has
        split += [{**group, "params": part} for part in gradients.by_mesh(group["params"])]
    optimizer.param_groups[:] = split
