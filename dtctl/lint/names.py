"""Names of torch that have several spellings, with one canonical spelling each."""

from __future__ import annotations

from typing import Final

DDP: Final = "torch.nn.parallel.DistributedDataParallel"
DP: Final = "torch.nn.DataParallel"
FSDP: Final = "torch.distributed.fsdp.FullyShardedDataParallel"
FULLY_SHARD: Final = "torch.distributed.fsdp.fully_shard"
SAMPLER: Final = "torch.utils.data.DistributedSampler"
LOADER: Final = "torch.utils.data.DataLoader"
INIT: Final = "torch.distributed.init_process_group"
SPAWNS: Final = frozenset(
    ["torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", "torch.multiprocessing.spawn.spawn"]
)
"""Functions `spawn(function, args=...)`, which pass the number of the process as the first argument."""
STARTS: Final = SPAWNS | {"torch.multiprocessing.Process", "multiprocessing.Process"}
"""Functions that start processes, including `Process(target=function, args=...)`."""
WRAPPERS: Final = frozenset({DDP, FSDP, FULLY_SHARD})
ENGINES: Final = frozenset(
    (
        "accelerate.Accelerator accelerate.accelerator.Accelerator deepspeed.initialize deepspeed.init_distributed "
        "horovod.torch.init"
    ).split()
)
"""Functions of frameworks that make a program's own loop distributed."""

_SAME: Final = {
    "torch.nn.parallel.distributed.DistributedDataParallel": DDP,
    "torch.nn.parallel.data_parallel.DataParallel": DP,
    "torch.nn.parallel.DataParallel": DP,
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": FSDP,
    "torch.distributed._composable.fsdp.fully_shard": FULLY_SHARD,
    "torch.distributed._composable.fully_shard": FULLY_SHARD,
    "torch.utils.data.distributed.DistributedSampler": SAMPLER,
    "torch.utils.data.dataloader.DataLoader": LOADER,
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.cuda.amp.GradScaler",
    "torch.cuda.amp.autocast_mode.autocast": "torch.cuda.amp.autocast",
    "torch.nn.utils.clip_grad.clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
}

COLLECTIVES: Final = frozenset(
    "torch.distributed." + name
    for name in (
        "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single "
        "all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier broadcast broadcast_object_list "
        "gather gather_object monitored_barrier reduce reduce_scatter reduce_scatter_tensor scatter "
        "scatter_object_list _all_gather_base"
    ).split()
)
"""Functions that every member of the group must call; new_group has a rule of its own."""

STATE_COLLECTIVES: Final = frozenset(
    "torch.distributed.checkpoint." + name
    for name in (
        "save async_save load state_dict.get_state_dict state_dict.get_model_state_dict "
        "state_dict.get_optimizer_state_dict state_dict.set_state_dict"
    ).split()
)
"""Functions that gather or write the state of all ranks."""

RELEVANT: Final = (
    "distributed DistributedSampler accelerate DataParallel DataLoader cuda.amp clip_grad .backward( NCCL_ GLOO_ "
    "MASTER_ADDR MASTER_PORT LOCAL_RANK local_rank local-rank fully_shard fairscale apex IterableDataset dist."
).split()
"""Words; a file is examined if it contains one of them. Most files have none, and need no index."""
TRAINS: Final = (
    "init_process_group DistributedDataParallel FullyShardedDataParallel fully_shard DistributedSampler LOCAL_RANK "
    "dist.all_reduce dist.broadcast dist.barrier dist.get_rank dist.all_gather Accelerator( deepspeed.init"
).split()
"""Words; each file that takes part in distributed training contains at least one."""


def resolve_canonical_name(name: str) -> str:
    """Return the canonical spelling of a dotted name."""
    if name.startswith("torch.distributed.distributed_c10d."):
        name = "torch.distributed." + name.rpartition(".")[2]
    return _SAME.get(name, name)
