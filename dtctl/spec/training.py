"""The `train:` section. `dtctl.runtime` is the authority on it: defaults and meaning are in runtime/config.py."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool, model_validator

from dtctl.spec.section import Count, CountOrZero, Degree, Positive, PositiveOrZero, Section, Share, Word

StrategyName = Literal["auto", "single", "ddp", "zero1", "fsdp", "hsdp", "tp", "pipeline"]


class Mesh(Section):
    """Degrees of parallelism; their product is the number of workers. One may be -1: what the others leave."""

    dp: Degree = 1
    """Data parallel replicas."""
    fsdp: Degree = 1
    """Workers that share the parameters of one replica."""
    cp: Degree = 1
    """Workers that divide the tokens of a sequence."""
    tp: Degree = 1
    """Tensor parallel degree."""
    pp: Degree = 1
    """Workers of a pipeline."""


class Ddp(Section):
    """Data parallel; strategies ddp and zero1."""

    bucket_mb: Count = 25
    """Size in MiB of the buckets in which gradients are exchanged."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """Look in every step for parameters that the loss does not depend on."""
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """Form of the gradients on the wire."""
    powersgd_rank: Count = 1
    """Rank of PowerSGD's approximation."""
    sync_batchnorm: bool = False
    """BatchNorm over the batch of all workers; on GPUs only."""


class Fsdp(Section):
    """Sharding of parameters, gradients and optimizer state."""

    reshard_after_forward: bool = True
    """Give a block's parameters up between forward and backward pass."""
    cpu_offload: bool = False
    """Keep shards in the host's memory; on GPUs only."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which gradients are added up over workers."""


class TensorParallel(Section):
    """Matrices split over workers."""

    plan: dict[str, str] = Field(default_factory=dict)
    """Pattern of module names -> colwise, rowwise, embedding, replicate. Empty: recognized by names."""
    sequence_parallel: bool = False
    """Split what is between the matrices along the sequence too."""


class Pipeline(Section):
    """Blocks split over workers."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"] = "1f1b"
    """Order of forward and backward passes."""
    micro_batches: Count | None = None
    """Forward passes of a step; another word for `accumulate`."""
    split: list[Count] | None = None
    """Blocks per stage, in order. Default: balanced by cost."""
    stages_per_worker: Count | None = None
    """Stages that each worker has. Default: 1, and 2 with interleaved, zero-bubble and zbv."""


def _without_secret(place: str) -> str:
    if re.search(r"://([^/]*:[^/]*@|.*\?)", place):
        raise ValueError("a URL here has no secrets in it: credentials come from the store's own variables and files")
    return place


class Snapshot(Section):
    """When and where the state of training is kept."""

    dir: Annotated[str, AfterValidator(_without_secret)] | None = None
    """Folder on the nodes, or a URL (s3://, gs:// ...) without secrets. Default: `snapshots` in the run's folder."""
    every_steps: Count | None = None
    """Steps between snapshots."""
    every_s: Positive | None = None
    """Seconds between snapshots."""
    keep: Count = 2
    """How many snapshots are kept, the newest ones."""
    keep_every_s: Positive | None = None
    """Of older ones, those that are at least so many seconds apart are kept as well."""
    keep_best: CountOrZero = 1
    """And those of so many of the best evaluations, if `train.best` is set."""
    layout: Literal["auto", "whole", "sharded"] = "auto"
    """Whole, written by rank 0, or sharded, by every worker its part. Default: as the strategy has the state."""
    replicas: CountOrZero = 0
    """On how many other nodes a copy is kept of what a node writes, where nodes have no folder in common."""
    when_busy: Literal["wait", "skip"] = "wait"
    """What a save does that is due while another one is still being written."""
    max_failed_saves: Count = 3
    """Saves that may fail one after another before training does."""


class Ema(Section):
    """A moving average of the weights."""

    decay: Share = 0.999
    """Share of the average that an update leaves."""
    every: Count = 1
    """Steps between updates."""
    evaluate: StrictBool = True
    """Whether evaluations use the average instead of the weights."""


class Best(Section):
    """Which evaluation is the best; its snapshot is kept."""

    metric: Word = "val_loss"
    """Name of a score as it is logged."""
    mode: Literal["min", "max"] = "min"
    """Whether low or high values are good."""


class Profile(Section):
    """What is recorded of a few steps."""

    start: Count | None = None
    """First step to record. Default: none, only on SIGUSR2."""
    steps: Count = 3
    """How many steps to record."""
    memory: StrictBool = False
    """Whether memory is recorded too."""
    communication: CountOrZero = 0
    """Pairs of passes by which the share of communication is measured before training begins."""


class Train(Section):
    """Read by `dtctl.runtime` in the workers; a job that does not use it ignores it."""

    strategy: StrategyName | Mesh | None = None
    """How the model is spread over the workers. auto: the first of ddp, zero1, hsdp and fsdp whose memory fits."""
    memory_gib: Positive | None = None
    """GiB of each worker's memory that `strategy: auto` may plan for. Default: 95% of its GPU's, or of its share of the
    node's."""
    blocks: str | None = None
    """Name of the list of the model's repeated blocks. Default: the largest ModuleList."""
    ddp: Ddp | None = None
    """Settings of ddp and zero1."""
    fsdp: Fsdp | None = None
    """Settings of sharding."""
    tp: TensorParallel | None = None
    """Settings of tensor parallelism."""
    pipeline: Pipeline | None = None
    """Settings of pipelines."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of the computation. Default fp32."""
    checkpointing: Literal["none", "full", "selective"] | Count | None = None
    """Which blocks compute their activations again in the backward pass: full, all; a number N, every N-th; selective,
    all but the results of matrix products. Default none."""
    compile: StrictBool | Literal["inductor", "aot_eager", "eager", "cudagraphs"] | None = None
    """Whether each block of the model is compiled, or the backend to compile it with."""
    on_oom: Literal["halve", "stop"] | None = None
    """Out of memory: halve (default) repeats the step with half the micro batch and the same global batch."""
    micro_batch: Count | None = None
    """Samples per worker and forward pass."""
    global_batch: Count | None = None
    """Samples per optimizer step over all workers."""
    accumulate: Count | None = None
    """Forward passes per optimizer step."""
    clip_norm: Positive | None = None
    """Largest norm of the gradient; larger ones are scaled down."""
    lr: Positive | None = None
    """Highest learning rate."""
    min_lr: PositiveOrZero | None = None
    """Learning rate at the end of the schedule."""
    warmup_steps: CountOrZero | None = None
    """Steps over which the learning rate rises to `lr`."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] | None = None
    """How the learning rate falls after the warm-up; wsd keeps it until the last `decay_steps`."""
    decay_steps: Count | None = None
    """Steps over which wsd lets the learning rate fall. Default: a tenth of all."""
    on_resize: Literal["keep", "linear", "sqrt"] | None = None
    """Going on with other numbers of workers: keep the global batch (default), or scale the learning rate with it."""
    optimizer: Literal["adamw", "sgd"] | None = None
    """Which optimizer."""
    beta1: Share | None = None
    """AdamW: decay of the mean of gradients. Default 0.9."""
    beta2: Share | None = None
    """AdamW: decay of the mean of squared gradients. Default 0.95."""
    eps: Positive | None = None
    """AdamW: what is added to the denominator. Default 1e-8."""
    momentum: Share | None = None
    """SGD: momentum. Default 0.9."""
    kernel: Literal["fused", "foreach", "loop"] | None = None
    """How the optimizer computes: one kernel for all parameters (default), one per operation, or one by one."""
    weight_decay: PositiveOrZero | None = None
    """Weight decay of the optimizer."""
    ema: Ema | None = None
    """A moving average of the weights."""
    on_nan: Literal["stop", "skip", "rollback"] | None = None
    """A gradient that is not finite: stop (default), skip the step, or go back to the last snapshot."""
    steps: Count | None = None
    """Length of the training in optimizer steps."""
    epochs: Count | None = None
    """Length of the training in passes over the data, instead of steps."""
    data_workers: CountOrZero | Literal["thread"] | None = None
    """Processes per worker that read data ahead, or a thread. Default 0: the loop reads."""
    data_prefetch: Count | None = None
    """Micro batches that each of those reads ahead. Default 2."""
    seed: CountOrZero | None = None
    """Seed of everything random."""
    log_every: Count | None = None
    """Steps between lines of metrics."""
    eval_every: Count | None = None
    """Steps between evaluations."""
    best: Best | None = None
    """Which evaluation is the best; its snapshot is kept beside the newest ones."""
    profile: Profile | None = None
    """What is recorded with torch's profiler."""
    wandb: Word | None = None
    """Project of Weights & Biases that metrics go to."""
    mlflow: Word | None = None
    """Experiment of MLflow that metrics go to."""
    exact: Literal["elastic"] | None = None
    """elastic: the same bits on any number of workers. Default: on the same number."""
    require_exact: bool | None = None
    """Fail rather than go on from a snapshot with other bits than a run that was never stopped."""
    timeout_s: Positive | None = None
    """Seconds after which a worker that waits for its peers gives up."""
    snapshot: Snapshot | None = None
    """When and where the state is kept."""
    model: dict[str, Any] | None = None
    """Given to the job's own code."""
    data: dict[str, Any] | None = None
    """Given to the job's own code."""

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are both set; keep one of the two (null unsets the other)")
        return self

    def settings(self) -> dict[str, Any]:
        """What the spec sets, as plain data; keys that it does not mention are left to the runtime."""
        return self.model_dump(exclude_none=True, exclude_unset=True)
