"""The settings of each strategy: `train.ddp`, `train.fsdp`, `train.tp`, `train.pipeline`.

A group that the chosen strategy does not use is allowed and ignored, so that one spec can be launched either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CommHook = Literal["none", "bf16", "fp16", "powersgd"]
Reduce = Literal["fp32", "bf16"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpConfig:
    """Data parallel; strategies ddp and zero1."""

    bucket_mb: int = field(default=25, metadata={"at_least": 1})
    """Size in MiB of the buckets in which gradients are exchanged."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order; lets DDP overlap more."""
    find_unused_parameters: bool = False
    """Look in every step for parameters that the loss does not depend on. Needed if there are any, and slower."""
    comm_hook: CommHook = "none"
    """Gradients on the wire: as they are, as bf16 or fp16, or as a low-rank approximation (PowerSGD, not exact)."""
    powersgd_rank: int = field(default=1, metadata={"at_least": 1})
    """Rank of PowerSGD's approximation; more is closer and more bytes."""
    sync_batchnorm: bool = False
    """BatchNorm over the batch of all workers, not of each alone; on GPUs only (torch has it there only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpConfig:
    """Sharded parameters, gradients and optimizer state; strategies fsdp and hsdp, and meshes with fsdp or tp."""

    reshard_after_forward: bool = True
    """Give a block's parameters up between forward and backward pass (ZeRO-3). false: keep them (ZeRO-2), which needs
    more memory and one exchange less."""
    cpu_offload: bool = False
    """Keep shards in the host's memory and bring them to the GPU when they are needed; on GPUs only."""
    reduce_dtype: Reduce = "fp32"
    """Number format in which gradients are added up over workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TpConfig:
    """Matrices split over workers; meshes with tp."""

    plan: Mapping[str, str] = field(default_factory=dict)
    """Pattern of module names (`blocks.*.wide`) -> colwise, rowwise, embedding, replicate. Empty: that of the models
    in strategies/tensor.py, recognized by their names."""
    sequence_parallel: bool = False
    """Split norms and dropout between the matrices along the sequence (dim 1) too: less memory for activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Blocks split over workers; strategy pipeline and meshes with pp."""

    schedule: ScheduleName = "1f1b"
    """Order of forward and backward passes. interleaved and zero-bubble give each worker two stages or more,
    zbv two."""
    micro_batches: int | None = field(default=None, metadata={"at_least": 1})
    """Forward passes of a step that are in the pipeline one after another; another word for `accumulate`, which must
    not contradict. None: `accumulate`, or else twice the number of workers of a pipeline."""
    split: tuple[int, ...] | None = None
    """Blocks per stage, in order; as many numbers as stages. None: balanced by cost."""
    stages_per_worker: int | None = field(default=None, metadata={"at_least": 1})
    """Stages that each worker has. None: 1, and 2 with interleaved, zero-bubble and zbv."""
