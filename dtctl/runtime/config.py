"""What a worker is told about the training: every key of the spec's `train:` section, with default and unit.

Three layers, the later one wins: defaults that the script hands to `load`, the spec (the launcher passes its `train:`
section as JSON in DTCTL_TRAIN_CONFIG), the command line (`--train.lr=1e-3`). How text becomes typed values, and what is
said when it cannot, is in settings.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dtctl import names
from dtctl.errors import PlanError, SpecError
from dtctl.runtime import settings
from dtctl.runtime.options import DdpConfig, FsdpConfig, PipelineConfig, TpConfig

StrategyName = Literal["auto", "single", "ddp", "zero1", "fsdp", "hsdp", "tp", "pipeline"]

DEFAULT_MICRO_BATCH: Final = 8
DEFAULT_SNAPSHOT_S: Final = 300.0
ENDLESS: Final = 1 << 62
"""Stands for the number of samples of a data set that has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """When and where the state of training is kept. With neither interval set: every 300 s. The end is always kept."""

    dir: str | None = None
    """Folder, or a URL that fsspec knows (s3://, gs:// ...). None: that of the run (DTCTL_SNAPSHOT_DIR), else
    `snapshots` in the working folder."""
    every_steps: int | None = field(default=None, metadata={"at_least": 1})
    """Steps between snapshots."""
    every_s: float | None = field(default=None, metadata={"above": 0})
    """Seconds between snapshots."""
    keep: int = field(default=2, metadata={"at_least": 1})
    """How many snapshots are kept, the newest ones."""
    keep_every_s: float | None = field(default=None, metadata={"above": 0})
    """Of older ones, those that are at least so many seconds apart are kept as well. None: none of them."""
    keep_best: int = field(default=1, metadata={"at_least": 0})
    """And those of so many of the best evaluations, if `train.best` is set."""
    layout: Literal["auto", "whole", "sharded"] = "auto"
    """whole: rank 0 gathers the state and writes it; sharded: every worker writes its part. auto: sharded where the
    strategy divides the state (zero1, fsdp, hsdp, tp, pipeline), else whole."""
    replicas: int = field(default=0, metadata={"at_least": 0})
    """On how many other nodes a copy is kept of what a node writes, where nodes have no folder in common."""
    when_busy: Literal["wait", "skip"] = "wait"
    """What a save does that is due while another one is still being written."""
    max_failed_saves: int = field(default=3, metadata={"at_least": 1})
    """Saves that may fail one after another before training does. One that fails at the end always counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaConfig:
    """A moving average of the weights, kept beside them and in snapshots."""

    decay: float = field(default=0.999, metadata={"above": 0, "below": 1})
    """Share of the average that an update leaves; lower in the first updates."""
    every: int = field(default=1, metadata={"at_least": 1})
    """Steps between updates."""
    evaluate: bool = True
    """Whether evaluations use the average instead of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestConfig:
    """Which evaluation is the best; its snapshot is kept beside the newest ones."""

    metric: str = "val_loss"
    """Name of a score as it is logged."""
    mode: Literal["min", "max"] = "min"
    """Whether low or high values are good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """What is recorded of a few steps, into the folder `profile` of the run; SIGUSR2 asks for it at any time."""

    start: int | None = field(default=None, metadata={"at_least": 1})
    """First step to record, from 1. None: only on SIGUSR2."""
    steps: int = field(default=3, metadata={"at_least": 1})
    """How many steps to record."""
    memory: bool = False
    """Whether memory is recorded too."""
    communication: int = field(default=0, metadata={"at_least": 0})
    """Pairs of passes, with and without exchange of gradients, by whose times the share of communication is measured
    before training begins. 0: it is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How to train; read by the runtime, not by the model."""

    strategy: StrategyName | Mapping[str, int] = "auto"
    """How the model is spread over the workers, by name, or by degrees of dp, fsdp, cp, tp and pp: missing is 1, one
    may be -1 for what is left (see mesh.py). auto: the first of ddp, zero1, hsdp and fsdp whose memory fits (see
    automatic.py); single with one worker."""
    memory_gib: float | None = field(default=None, metadata={"above": 0})
    """GiB of each worker's memory that `strategy: auto` may plan for. None: 95% of its GPU's, or of its share of the
    node's."""
    blocks: str | None = None
    """Name of the list of the model's repeated blocks, such as `transformer.layers`. None: the largest ModuleList."""
    ddp: DdpConfig = field(default_factory=DdpConfig)
    """Settings of ddp and zero1."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Settings of sharding."""
    tp: TpConfig = field(default_factory=TpConfig)
    """Settings of tensor parallelism."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Settings of pipelines."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of the computation; parameters and optimizer state stay fp32."""
    checkpointing: Literal["none", "full", "selective"] | int = field(default="none", metadata={"at_least": 1})
    """Which blocks of the model forget their activations and compute them again in the backward pass: full, all of
    them; a number N, every N-th; selective, all, but results of matrix products and attention are kept."""
    compile: bool | Literal["inductor", "aot_eager", "eager", "cudagraphs"] = False
    """Whether each block of the model is compiled with torch.compile; true is inductor, or the name of a backend."""
    on_oom: Literal["halve", "stop"] = "halve"
    """What to do when a worker runs out of memory in a forward or backward pass. halve: all workers repeat the step
    with half the micro batch and twice the passes, and stay with it; the global batch is the same (single, ddp)."""
    micro_batch: int | None = field(default=None, metadata={"at_least": 1})
    """Samples per worker and forward pass. None: what the two others leave, else 8."""
    global_batch: int | None = field(default=None, metadata={"at_least": 1})
    """Samples per optimizer step over all workers. None: micro_batch * workers * accumulate."""
    accumulate: int | None = field(default=None, metadata={"at_least": 1})
    """Forward passes per optimizer step. None: what the two others leave, else 1."""
    clip_norm: float | None = field(default=None, metadata={"above": 0})
    """Largest 2-norm of the whole gradient; a larger one is scaled down to it. None: no limit."""
    lr: float = field(default=1e-3, metadata={"above": 0})
    """Highest learning rate."""
    min_lr: float = field(default=0.0, metadata={"at_least": 0})
    """Learning rate at the last step (schedules linear and cosine)."""
    warmup_steps: int = field(default=0, metadata={"at_least": 0})
    """Steps over which the learning rate rises linearly to `lr`."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up; wsd keeps it until the last `decay_steps`."""
    decay_steps: int | None = field(default=None, metadata={"at_least": 1})
    """Steps over which wsd lets the learning rate fall. None: a tenth of all steps."""
    on_resize: Literal["keep", "linear", "sqrt"] = "keep"
    """What follows from going on with another number of workers. keep: the global batch stays as it was, by other
    numbers of samples and passes; linear, sqrt: micro_batch and accumulate stay, and the learning rate is multiplied
    with the ratio of the global batches, or its root."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with momentum."""
    beta1: float = field(default=0.9, metadata={"at_least": 0, "below": 1})
    """AdamW: decay of the mean of gradients."""
    beta2: float = field(default=0.95, metadata={"at_least": 0, "below": 1})
    """AdamW: decay of the mean of squared gradients."""
    eps: float = field(default=1e-8, metadata={"above": 0})
    """AdamW: what is added to the root of the mean of squared gradients."""
    momentum: float = field(default=0.9, metadata={"at_least": 0, "below": 1})
    """SGD: momentum."""
    kernel: Literal["fused", "foreach", "loop"] = "fused"
    """How the optimizer computes: one kernel for all parameters, one per operation, or parameter by parameter."""
    weight_decay: float = field(default=0.0, metadata={"at_least": 0})
    """Decay of parameters of two and more dimensions; biases and norms are never decayed."""
    ema: EmaConfig | None = None
    """A moving average of the weights. None: there is none."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """What to do about a gradient that is not finite. skip: the step does not change the weights; rollback: go back
    to the newest snapshot and on with the samples that come next. A snapshot never holds what was spoilt."""
    steps: int | None = field(default=None, metadata={"at_least": 1})
    """Length of the training in optimizer steps. None: `epochs`."""
    epochs: int | None = field(default=None, metadata={"at_least": 1})
    """Length of the training in passes over the data. None: `steps`; with neither, one pass."""
    data_workers: int | Literal["thread"] = field(default=0, metadata={"at_least": 0})
    """Processes per worker that read data ahead of the loop. thread: a thread reads ahead, for data sets that make
    whole batches. 0: the loop reads."""
    data_prefetch: int = field(default=2, metadata={"at_least": 1})
    """Micro batches that each of those reads ahead."""
    seed: int = field(default=0, metadata={"at_least": 0})
    """Seed of initial weights, sample order and dropout."""
    log_every: int = field(default=10, metadata={"at_least": 1})
    """Steps between lines of metrics."""
    eval_every: int | None = field(default=None, metadata={"at_least": 1})
    """Steps between evaluations. None: only after the last step."""
    best: BestConfig | None = None
    """Which evaluation is the best. None: none is kept."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """What is recorded with torch's profiler."""
    wandb: str | None = None
    """Project of Weights & Biases that metrics go to. None: none."""
    mlflow: str | None = None
    """Experiment of MLflow that metrics go to. None: none."""
    exact: Literal["elastic"] | None = None
    """elastic: the same bits on any number of workers (ddp and single only; slower, see elastic.py). None: on the same
    number."""
    require_exact: bool = False
    """Whether to fail rather than to go on from a snapshot with other bits than a run that was never stopped."""
    timeout_s: float = field(default=600.0, metadata={"above": 0})
    """Seconds after which a worker that waits for its peers gives up."""
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    """When and where the state is kept."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """For the script's own model; see `settings.build` for a strict way to read it."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """For the script's own data."""


def load(
    defaults: Mapping[str, Any] | None = None,
    *,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> TrainConfig:
    """The configuration of this run.

    Args:
        defaults: what the script prefers where nobody says anything else; keys as in the spec.
        argv: arguments; those that begin with `--train.` are read, the rest is the script's own. None: the process's.
        environ: environment. None: the process's.

    Raises:
        SpecError: a key is unknown, a value has the wrong type or is out of range, or two keys exclude each other.
    """
    environ = os.environ if environ is None else environ
    argv = sys.argv[1:] if argv is None else argv
    layers = [
        ("defaults of the script", dict(defaults or {})),
        (names.TRAIN_CONFIG, settings.from_json(environ.get(names.TRAIN_CONFIG, ""), where=names.TRAIN_CONFIG)),
        ("command line", settings.from_argv(argv)),
    ]
    merged: dict[str, Any] = {}
    for where, layer in layers:
        checked = settings.build(TrainConfig, layer, at="train", where=where)
        if checked.steps is not None and checked.epochs is not None:
            raise SpecError(
                "train.steps and train.epochs are both set", where=where, key="train.epochs", hint="keep one of the two"
            )
        merged = settings.merge(_yielding(merged, layer), layer)
    return settings.build(TrainConfig, merged, at="train", where="train")


def _yielding(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of a layer under one that settles the same matter with other keys."""
    given = {key for key, value in upper.items() if value is not None}
    sizes = {"micro_batch", "global_batch", "accumulate"}
    gone = sizes if len(sizes & given) >= 2 else set()
    if given & {"steps", "epochs"}:
        gone = gone | {"steps", "epochs"}
    return {key: value for key, value in lower.items() if key not in gone}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The three sizes of a batch, and the number of workers that makes them agree."""

    micro: int
    """Samples per worker and forward pass."""
    accumulate: int
    """Forward passes per optimizer step."""
    world_size: int
    """Workers that take different samples; all, unless some share a model."""

    @property
    def total(self) -> int:
        """Samples per optimizer step over all workers."""
        return self.micro * self.world_size * self.accumulate

    def describe(self) -> str:
        """The sizes in words for people."""
        return f"global batch {self.total} = {self.micro} x {self.world_size} x {self.accumulate}"


def batch(config: TrainConfig, world_size: int, *, stages: int = 1) -> Batch:
    """Sizes such that global_batch = micro_batch * workers * accumulate.

    Args:
        config: of the training.
        world_size: workers that take different samples.
        stages: workers of a pipeline, which needs several micro batches.

    Raises:
        PlanError: the sizes that are set cannot be had with this number of workers.
    """
    micro, total, accumulate = config.micro_batch, config.global_batch, config.accumulate
    if stages > 1:
        accumulate = _in_pipeline(config, stages)
    if total is None:
        return Batch(micro=micro or DEFAULT_MICRO_BATCH, accumulate=accumulate or 1, world_size=world_size)
    if micro is None:
        parts = world_size * (accumulate or 1)
        _divisible(total, parts, f"{world_size} workers * accumulate {accumulate or 1}")
        return Batch(micro=total // parts, accumulate=accumulate or 1, world_size=world_size)
    if accumulate is None:
        _divisible(total, micro * world_size, f"micro_batch {micro} * {world_size} workers")
        return Batch(micro=micro, accumulate=total // (micro * world_size), world_size=world_size)
    found = Batch(micro=micro, accumulate=accumulate, world_size=world_size)
    if found.total != total:
        raise PlanError(
            f"micro_batch {micro} * {world_size} workers * accumulate {accumulate} is {found.total}, "
            f"and global_batch is {total}",
            where="train.global_batch",
            hint="leave one of the three out and it is derived",
        )
    return found


def _in_pipeline(config: TrainConfig, stages: int) -> int | None:
    """Micro batches of a step in a pipeline; None if the two other sizes say it.

    Raises:
        PlanError: the two words for it contradict each other.
    """
    named, accumulate = config.pipeline.micro_batches, config.accumulate
    if named and accumulate and named != accumulate:
        raise PlanError(
            f"pipeline.micro_batches is {named} and accumulate is {accumulate}, and they are the same thing",
            where="train.pipeline.micro_batches",
            hint="keep one of the two",
        )
    if named or accumulate or (config.micro_batch and config.global_batch):
        return named or accumulate
    return 2 * stages


def _divisible(total: int, parts: int, made_of: str) -> None:
    if total % parts:
        below, above = total // parts * parts, (total // parts + 1) * parts
        near = f"{below} or {above}" if below else str(above)
        raise PlanError(
            f"global_batch {total} cannot be divided by {made_of} = {parts}",
            where="train.global_batch",
            hint=f"the nearest that can: {near}",
        )


def length(config: TrainConfig, *, samples: int, batch: Batch) -> tuple[int, int]:
    """Optimizer steps of the training, and the number of samples that it ends after.

    Raises:
        PlanError: there are no samples, or so few that one would be twice in a step.
    """
    if samples == 0:
        raise PlanError("the data set has no samples", where="train.data")
    if config.steps is None and samples >= ENDLESS:
        raise PlanError("a stream of samples has no end", where="train.steps", hint="set `train.steps`")
    end = config.steps * batch.total if config.steps is not None else (config.epochs or 1) * samples
    if samples < min(end, batch.total):
        raise PlanError(
            f"the data set has {samples} samples, fewer than one step takes: {batch.describe()}",
            where="train.global_batch",
            hint="a sample would be twice in one step; lower global_batch, micro_batch or accumulate",
        )
    return -(-end // batch.total), end
