"""Sharded data parallel (ZeRO 2 and 3) by torch's `fully_shard`, with tensor, context and expert parallel.

Each block of the model is sharded separately, so that only one or two blocks are gathered at a time. Parameters outside
of blocks
form one more group. On a mesh of replicas and shards (hsdp), gradients are added up inside a replica first. With tp the
matrices are split before that, and with ep the experts (moe/divide.py).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
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
from dtctl.runtime.distributed.device_mesh import build_context_group, build_device_mesh, build_expert_mesh
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
from dtctl.runtime.strategies.accumulation import accumulate_gradients
from dtctl.runtime.strategies.single import StatelessStrategy
from dtctl.train.config import FsdpConfig, TrainConfig
from dtctl.train.mesh import Degrees


class FullySharded(StatelessStrategy):
    """Model whose parameters are DTensors; it is changed in place."""

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
        seen: comparison.RecordedCalls | None = None,
    ) -> None:
        """Divide a model over the workers.

        Args:
            model: the model, which gets rank 0's values on all workers. With tp, cp and ep it must be whole, equal, and
                on the worker's device.
            config: settings of the run.
            worker: this worker.
            degrees: degrees of the mesh; pp is 1.
            mesh: mesh with all axes.
            seen: calls of `list_compared_modules`, with which every divided module is compared. None: no comparison.

        Raises:
            PlanError: an option needs another device, the model cannot be split, or a part of it computes another
                result if it is split.
        """
        silence_torch_warnings()
        self.name = str(degrees)
        self._replaces = worker.is_replacement
        self.module = self.inference = model
        self._mesh = mesh
        self._shares_buffers = degrees.data * degrees.cp > 1 and _has_kept_buffers(model)
        if self._shares_buffers:
            find_data_group(mesh)  # before any change, since it can fail to make a group
        found = blocks.find_repeated_blocks(model, config.blocks)
        group = build_context_group(degrees, worker.device.type) if degrees.cp > 1 else None
        if group is not None and seen is not None:
            context.require_equal_blocks(found, group, seen)
        if degrees.tp > 1:
            tensor.split_model_matrices(model, found, config.tp, mesh["tp"], seen)
        if group is not None:
            divided = context.divide_block_tokens(found, group)
            for part in model.modules():
                if isinstance(part, MoE):
                    part.sequence = divided
        self._experts = spread_experts(model, degrees, worker, mesh, seen) if degrees.ep > 1 else None
        self.present: unused.UsedParameters | None = None
        self._turns: unused.GatherOrder | None = None
        if degrees.data * degrees.cp > 1:
            in_turns = degrees.cp == degrees.ep == 1
            self._turns = shard_model(model, config, worker, mesh, in_turns=in_turns, experts=self._experts)
            self.present = unused.UsedParameters(model, [model], [name for name, _ in model.named_parameters()])
            keep_buffers_alike(model, mesh)
        self._wanted = gradients.list_trained_parameters(model)
        self._every_pass = config.fsdp.exchange_every_pass

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Split parameter groups by mesh, since fused optimizers do not mix tensors of several meshes; collective."""
        separate_meshes(optimizer)
        # The other workers are in the middle of training and take no part in a trial; see
        # live.recovery.find_recovery_obstacle.
        if not self._replaces:
            whole_steps.take_whole_steps(optimizer)

    def gradients(self, step: Step) -> torch.Tensor:
        """Run one micro batch after another; before the last, gradients are added up locally or sharded."""
        beside = tuple if self._turns is None else self._turns.ends  # for blocks that this worker has skipped
        return accumulate_gradients(step, self.module, local=self._pausing_gradient_sync, beside=beside)

    @contextmanager
    def _pausing_gradient_sync(self) -> Iterator[None]:
        """Return a context in which gradients are neither exchanged nor sharded."""
        sharded = self.module if isinstance(self.module, FSDPModule) and not self._every_pass else None
        if sharded is not None:
            sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if sharded is not None:
                sharded.set_requires_gradient_sync(True)

    def release(self) -> None:
        """Discard the pass under way; shards stay."""
        if isinstance(self.module, FSDPModule):
            regroup.reset_interrupted_pass(self.module)
        if self._turns is not None:
            self._turns.drop_order()

    def rejoin(self, worker: Worker, degrees: Degrees) -> None:
        """Continue in new process groups with the present shards; collective, with the replacements.

        Replacements make their groups in the same order, and all groups are made before anything is changed. This does
        not apply to tp and cp, which have other groups.
        """
        mesh = build_device_mesh(degrees, worker.device.type)
        if self._shares_buffers:
            find_data_group(mesh)
        meshes = [(self._mesh, mesh)]
        if self._experts is not None:
            meshes.append((self._experts.mesh, build_expert_mesh(degrees, worker.device.type)))
        regroup.replace_mesh_groups(meshes)
        regroup.apply_mesh_groups(self.module)
        if self._experts is not None:
            divide.renew_expert_groups(self._experts.modules)

    def finish(self) -> None:
        """Do nothing: gradients are complete when their passes have ended."""

    def norm(self) -> torch.Tensor:
        """Return the norm of the gradient over all shards; collective."""
        return gradients.compute_gradient_norm(self._wanted)

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradient down if its norm exceeds the limit."""
        gradients.clip_gradients(self._wanted, max_norm, norm)


def silence_torch_warnings() -> None:
    """Silence two warnings of torch 2.13 that appear at every use and call for no action."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Gathering tensors that are sharded over two axes takes two exchanges, which is known and only done for snapshots.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def begin_alike(model: nn.Module) -> None:
    """Give every worker rank 0's parameters and buffers, as DDP does when it wraps a model."""
    for value in [*model.parameters(), *model.buffers()]:
        dist.broadcast(value.detach(), src=0)


@dataclass(frozen=True, slots=True)
class ShardedExperts:
    """Modules of a model that hold experts; each worker has a part of the experts."""

    modules: Sequence[nn.Module]
    mesh: DeviceMesh
    """Mesh that `build_expert_mesh` returns."""

    @property
    def replica_mesh(self) -> DeviceMesh | None:
        """Return the mesh of the workers that have the same experts; None if there is only one."""
        over = self.mesh["dp", "fsdp"] if "dp" in (self.mesh.mesh_dim_names or ()) else self.mesh["fsdp"]
        return over if over.size() > 1 else None


def list_compared_modules(model: nn.Module, config: TrainConfig, degrees: Degrees) -> list[str]:
    """Return the names of modules that may be compared before they are divided over tp, cp and ep.

    Raises:
        PlanError: the modules cannot be divided in this way.
    """
    found = blocks.find_repeated_blocks(model, config.blocks)
    names: list[str] = []
    if degrees.tp > 1:
        names += tensor.list_split_modules(tensor.choose_split(model, found, config.tp, degrees.tp))
    if degrees.cp > 1 and found is not None:
        names += found.names
    if degrees.ep > 1:
        names += recognize.find_expert_modules(model)
    return list(dict.fromkeys(names))


def spread_experts(
    model: nn.Module, degrees: Degrees, worker: Worker, mesh: DeviceMesh, seen: comparison.RecordedCalls | None = None
) -> ShardedExperts:
    """Divide a model's experts over the axes ep and tp; collective over all workers.

    Args:
        model: the model, which is changed in place.
        degrees: degrees of the mesh.
        worker: this worker.
        mesh: mesh with all axes.
        seen: calls of the experts, with which they are compared. None: no comparison.

    Raises:
        PlanError: the model has no experts, their number cannot be divided by the workers, or they compute another
            result if they are divided.
    """
    apart = build_expert_mesh(degrees, worker.device.type)
    alike = mesh["tp"].get_group() if degrees.tp > 1 else None
    if seen is not None:
        divide.require_equal_experts(model, apart, alike, seen)
    return ShardedExperts(divide.divide_experts(model, apart, alike), apart)


def shard_model(
    model: nn.Module,
    config: TrainConfig,
    worker: Worker,
    mesh: DeviceMesh,
    *,
    in_turns: bool,
    experts: ShardedExperts | None = None,
) -> unused.GatherOrder | None:
    """Apply `fully_shard` to each block and to the rest of the model, over the axes dp and fsdp.

    Args:
        model: the model, which is changed in place.
        config: settings of the run.
        worker: this worker.
        mesh: mesh with all axes.
        in_turns: True if workers may skip different blocks; then the result keeps a common order of them.
        experts: experts that are divided over workers.

    Raises:
        PlanError: offloading is requested without an accelerator, or a block shares parameters with modules outside of
            it, which fully_shard would separate silently (torch 2.13).
    """
    found = blocks.find_repeated_blocks(model, config.blocks)
    blocks.require_apart(model, found.modules if found else [])
    bring = partial(deferred_init.broadcast_module_tensors, model=model, worker=worker)
    turns: list[unused.GatherOrder] = []

    def between(units: Sequence[nn.Module]) -> None:
        if in_turns:
            turns.append(unused.GatherOrder(model, units))

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
    experts: ShardedExperts | None = None,
) -> None:
    """Apply `fully_shard` to some modules and then to the module that contains them.

    Args:
        root: module that contains the others.
        modules: modules to shard separately.
        config: settings of the run.
        worker: this worker.
        mesh: mesh with all axes.
        first: called with each module before it is sharded.
        between: called with the modules that have parameters, before the root is sharded.
        experts: experts that are divided over workers; those in the root are sharded over the workers with the same
            experts.

    Raises:
        PlanError: as in `shard_model`.
    """
    options = config.fsdp
    # Two axes mean replicas of shards; for one replica, one axis gives the same at a lower cost.
    over = mesh["dp", "fsdp"] if "dp" in (mesh.mesh_dim_names or ()) else mesh["fsdp"]
    policy, offload = build_precision_policy(options), build_offload_policy(options, worker)
    apart: set[nn.Parameter] = set()
    if experts is not None:
        inside = set(root.modules())
        apart = _shard_experts(
            ShardedExperts([m for m in experts.modules if m in inside], experts.mesh), options, worker
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
    """Return copies of those outputs of a block that are views.

    fully_shard attaches the hook that gathers parameters for the backward pass to a block's output. torch loses the
    hook if the output is a view and later code changes it in place (torch 2.13).
    """
    if isinstance(output, torch.Tensor):
        return output.clone() if output._is_view() else output
    return tree_map_only(torch.Tensor, lambda value: value.clone() if value._is_view() else value, output)


def _shard_experts(experts: ShardedExperts, options: FsdpConfig, worker: Worker) -> set[nn.Parameter]:
    """Shard experts over the workers that have the same experts.

    Returns:
        Parameters of experts that no other worker has, so that there is nothing to exchange.
    """
    if experts.replica_mesh is None:
        return {parameter for module in experts.modules for parameter in module.parameters()}
    for module in experts.modules:
        fully_shard(
            module,
            mesh=experts.replica_mesh,
            reshard_after_forward=options.reshard_after_forward,
            shard_placement_fn=divide.make_expert_placement(experts.mesh),
            mp_policy=build_precision_policy(options),
            offload_policy=build_offload_policy(options, worker),
        )
    return set()


def _shard_again(model: nn.Module, *_: Any) -> None:
    """Reshard parameters after a forward pass without a backward pass.

    fully_shard leaves some parameters whole after a forward pass, and `model.parameters()` then has other tensors than
    the optimizer.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def build_precision_policy(options: FsdpConfig) -> MixedPrecisionPolicy:
    """Return the formats of gathered parameters and of summed gradients; fp32 means that of the parameters."""
    half = options.param_dtype == "bf16"
    # otherwise gradients would be added up in the format of the gathered parameters
    own = torch.float32 if half else None
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None,
        reduce_dtype=torch.bfloat16 if options.reduce_dtype == "bf16" else own,
    )


def build_offload_policy(options: FsdpConfig, worker: Worker) -> OffloadPolicy:
    """Return the policy for the memory in which shards are kept.

    Raises:
        PlanError: the host's memory is requested, and there is no accelerator.
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

    Only buffers in snapshots: running means of BatchNorm, which otherwise depend on each worker's own samples.
    """
    if not _has_kept_buffers(model):
        return
    state = model.state_dict(keep_vars=True)

    def bring(module: nn.Module, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            group = find_data_group(
                mesh
            )  # looked up at each pass, since a replacement of a lost worker changes the group
            source = dist.get_global_rank(group, 0)
            for name, buffer in model.named_buffers():
                if name in state and not isinstance(buffer, DTensor):
                    dist.broadcast(buffer, src=source, group=group)

    model.register_forward_pre_hook(bring, prepend=True)


def _has_kept_buffers(model: nn.Module) -> bool:
    """Return whether snapshots contain buffers of the model."""
    state = model.state_dict(keep_vars=True)
    return any(name in state for name, _ in model.named_buffers())


def find_data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of the workers that have the same part of the model and other samples."""
    over = mesh["dp", "fsdp"]._flatten("data") if "dp" in (mesh.mesh_dim_names or ()) else mesh["fsdp"]
    return over.get_group()


def separate_meshes(optimizer: torch.optim.Optimizer) -> None:
    """Split parameter groups so that each has tensors of one mesh, and disable features that DTensors lack."""
    split = []
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and any(isinstance(value, DTensor) for value in group["params"]):
            group["fused"] = False  # torch 2.13: aten._fused_sgd_ has no sharding strategy; AdamW's has
        split += [{**group, "params": part} for part in gradients.group_by_mesh(group["params"])]
    optimizer.param_groups[:] = split
