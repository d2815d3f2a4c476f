"""Configuration of a worker: every key of the spec's `train:` section, with default and unit.

Three layers, the later one wins: defaults that the script hands to `load`, the spec (the launcher passes its `train:`
section as JSON in DTCTL_TRAIN_CONFIG), the command line (`--train.lr=1e-3`). How text becomes typed values, and the
errors when it cannot, are in settings.py.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dtctl import names
from dtctl.train import settings
from dtctl.train.mesh import Degrees

StrategyName = Literal["auto", "single", "ddp", "zero1", "fsdp", "hsdp", "tp", "pipeline"]

CommHook = Literal["none", "bf16", "fp16", "powersgd"]
Reduce = Literal["fp32", "bf16"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]

DEFAULT_SNAPSHOT_S: Final = 300.0


def _without_secret(place: str) -> None:
    if re.search(r"://([^/]*:[^/]*@|.*\?)", place):
        raise ValueError("a URL here has no secrets in it: credentials come from the store's own variables and files")


def _require_positive_shares(shares: Mapping[str, int]) -> None:
    for name, share in shares.items():
        if share < 1:
            raise ValueError(f"a share is at least 1, and {name} has {share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpConfig:
    """Settings of data parallelism; strategies ddp and zero1."""

    bucket_mb: int = field(default=25, metadata={"at_least": 1})
    """Size in MiB of the buckets in which gradients are exchanged."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order; lets DDP overlap more."""
    find_unused_parameters: bool = False
    """Search in every step for parameters that the loss does not depend on. Slower; necessary if there are any."""
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
    """Free a block's gathered parameters between forward and backward pass (ZeRO-3). false: keep them (ZeRO-2), which
    needs more memory and one exchange less."""
    cpu_offload: bool = False
    """Keep shards in the host's memory and bring them to the GPU when they are needed; on GPUs only."""
    reduce_dtype: Reduce = "fp32"
    """Number format in which gradients are added up over workers."""
    param_dtype: Reduce = "fp32"
    """Number format in which parameters are gathered. fp32: `precision: bf16` computes the same as in one
    process. bf16, with `precision: bf16`: half the bytes, and no casts that stay until the backward pass (2 bytes for
    each parameter of the whole model); norms, biases and hidden states between blocks are rounded, too."""
    exchange_every_pass: bool = False
    """Add gradients up over workers in every pass of a step instead of the last alone. With `accumulate` above 1: 4
    bytes less for each parameter of the whole model, and as many more exchanges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TpConfig:
    """Matrices split over workers; meshes with tp."""

    plan: Mapping[str, str] = field(default_factory=dict)
    """Pattern of module names (`blocks.*.wide`) -> colwise, rowwise, embedding, replicate, or colwise-3 for a matrix
    with three outputs. Empty: the plan of a known model (docs/strategies.md), which dtctl recognizes by the names of
    its modules."""
    sequence_parallel: bool = False
    """Split norms and dropout between the matrices along the sequence (dim 1) too: less memory for activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Blocks split over workers; strategy pipeline and meshes with pp."""

    schedule: ScheduleName = "1f1b"
    """Order of forward and backward passes. interleaved and zero-bubble give each worker two stages or more,
    zbv two."""
    micro_batches: int | None = field(default=None, metadata={"at_least": 1})
    """Forward passes of a step that are in the pipeline one after another; another name of `accumulate`; the two must
    not differ. None: `accumulate`, or else twice the number of workers of a pipeline."""
    split: tuple[int, ...] | None = field(default=None, metadata={"at_least": 1})
    """Blocks per stage, in order; one number for each stage. None: balanced by cost."""
    stages_per_worker: int | None = field(default=None, metadata={"at_least": 1})
    """Stages that each worker has. None: 1, and 2 with interleaved, zero-bubble and zbv."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshotConfig:
    """Snapshots in the memory of the nodes, more frequent than those on disk. `dtctl launch` only."""

    every_steps: Literal["auto"] | int = field(default="auto", metadata={"at_least": 1})
    """Steps between two of these snapshots. auto: an interval at which they take at most 2% of the time, measured
    during training."""
    copies: int = field(default=1, metadata={"at_least": 0})
    """Number of other nodes that keep a copy of what a node has."""

    @property
    def most_held(self) -> int:
        """Parts of snapshots that a worker has in memory at most: two are kept, one is written, all with copies."""
        return 3 * (1 + self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """Times and place of snapshots. With neither interval set: every 300 s. The end is always kept."""

    dir: str | None = field(default=None, metadata={"check": _without_secret})
    """Folder, or a URL that fsspec supports (s3://, gs:// ...). None: that of the run (DTCTL_SNAPSHOT_DIR), else
    `snapshots` in the working folder."""
    every_steps: int | None = field(default=None, metadata={"at_least": 1})
    """Optimizer steps between two snapshots."""
    every_s: float | None = field(default=None, metadata={"above": 0})
    """Seconds between two snapshots."""
    keep: int = field(default=2, metadata={"at_least": 1})
    """Number of snapshots that are kept, the newest ones."""
    keep_every_s: float | None = field(default=None, metadata={"above": 0})
    """Seconds between older snapshots that are kept as well, at least. None: none of them."""
    keep_best: int = field(default=1, metadata={"at_least": 0})
    """Number of snapshots with the best evaluations that are kept as well, if `train.best` is set."""
    layout: Literal["auto", "whole", "sharded"] = "auto"
    """whole: rank 0 gathers the state and writes it; sharded: every worker writes its part. auto: sharded where the
    strategy divides the state (zero1, fsdp, hsdp, tp, pipeline), else whole."""
    replicas: int = field(default=0, metadata={"at_least": 0})
    """Number of other nodes that keep a copy of what a node writes, where nodes have no folder in common."""
    trained_only: bool = False
    """Leave parameters that require no gradient out of snapshots: those of LoRA have the size of the adapter. The
    program loads the frozen ones itself, before training; a resume with other values of them is refused."""
    memory: MemorySnapshotConfig | None = None
    """Snapshots in memory, in addition to those on disk: a lost worker continues from the snapshot of its own node, a
    lost node from that of its neighbour. None: none."""
    when_busy: Literal["wait", "skip"] = "wait"
    """Action of a save that is due while another one is still being written."""
    max_failed_saves: int = field(default=3, metadata={"at_least": 1})
    """Saves that may fail one after another before training does. One that fails at the end always counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaConfig:
    """A moving average of the weights, which is also kept in snapshots."""

    decay: float = field(default=0.999, metadata={"above": 0, "below": 1})
    """Share of the average that an update leaves; lower in the first updates."""
    every: int = field(default=1, metadata={"at_least": 1})
    """Steps between updates of the average."""
    evaluate: bool = True
    """Use the average instead of the weights in evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestConfig:
    """Criterion for the best evaluation; its snapshot is kept in addition to the newest ones."""

    metric: str = field(default="val_loss", metadata={"not_empty": True})
    """Name of a score as it is logged."""
    mode: Literal["min", "max"] = "min"
    """Direction of the metric: min if low values are good, max if high ones are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Record of a few steps, in the folder `profile` of the run; SIGUSR2 starts it at any time."""

    start: int | None = field(default=None, metadata={"at_least": 1})
    """First step to record, from 1. None: only on SIGUSR2."""
    steps: int = field(default=3, metadata={"at_least": 1})
    """Number of steps to record."""
    memory: bool = False
    """Record the use of memory, too."""
    communication: int = field(default=0, metadata={"at_least": 0})
    """Number of pairs of passes, with and without exchange of gradients, that measure the share of communication before
    training begins. 0: it is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a run; read by the runtime, not by the model."""

    strategy: StrategyName | Mapping[str, int] = field(default="auto", metadata={"section": Degrees})
    """Division of the model over the workers, by name, or by degrees of dp, fsdp, cp, tp and pp: a missing axis is 1,
    and one degree may be -1 for the remaining workers. auto: the first of ddp, zero1, hsdp and fsdp whose memory fits;
    single with one worker."""
    memory_gib: float | None = field(default=None, metadata={"above": 0})
    """GiB of each worker's memory that `strategy: auto` may plan for. None: 90% of its GPU's, or of its share of the
    node's."""
    blocks: str | None = None
    """Name of the list of the model's repeated blocks, such as `transformer.layers`. None: the largest ModuleList."""
    ddp: DdpConfig = field(default_factory=DdpConfig)
    """Settings of ddp and zero1."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Settings of fsdp, hsdp, and meshes with fsdp or tp."""
    tp: TpConfig = field(default_factory=TpConfig)
    """Settings of tensor parallelism."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Settings of pipeline, and meshes with pp."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of the computation; parameters and optimizer state stay fp32."""
    tf32: bool = False
    """Let GPUs round the factors of fp32 products to 10 bits (TF32), several times as fast; sums stay fp32."""
    cudnn_benchmark: bool = False
    """Let cuDNN measure which of its kernels is the fastest for each shape of convolution. Faster where shapes stay the
    same; not with deterministic kernels."""
    channels_last: bool = False
    """Store images in the channels-last layout, which convolutions in bf16 and fp16 on GPUs prefer. For single, ddp
    and zero1."""
    bind_cores: bool = False
    """Keep each worker on the cores of the processor that its GPU is attached to (NUMA)."""
    checkpointing: Literal["none", "full", "selective"] | int = field(default="none", metadata={"at_least": 1})
    """Blocks of the model that free their activations and compute them again in the backward pass: full, all of
    them; a number N, every N-th; selective, all, but results of matrix products and attention are kept."""
    compile: bool | Literal["inductor", "aot_eager", "eager", "cudagraphs"] = False
    """Compile each block of the model with torch.compile; true is inductor, or the name of a backend."""
    on_oom: Literal["halve", "stop"] = "halve"
    """Action when a worker runs out of memory in a forward or backward pass. halve: all workers repeat the step with
    half the micro batch and twice the passes, and stay with it; the global batch is the same (single, ddp). stop: the
    worker fails."""
    micro_batch: int | None = field(default=None, metadata={"at_least": 1})
    """Samples per worker and forward pass; see `shares`. None: what the two others leave, else 8."""
    shares: Mapping[str, int] = field(default_factory=dict, metadata={"check": _require_positive_shares})
    """Number of times `micro_batch` that a worker takes, where GPUs are unequal: by the name of its GPU or a part of
    it, or that of its node. With `{H100: 2}`, other GPUs take it once. The weight of a sample does not change. Not
    with pp or `exact: elastic`."""
    global_batch: int | None = field(default=None, metadata={"at_least": 1})
    """Samples per optimizer step over all workers. None: micro_batch * workers * accumulate; a worker counts as often
    as `shares` has for it."""
    accumulate: int | None = field(default=None, metadata={"at_least": 1})
    """Forward passes per optimizer step. None: what the two others leave, else 1."""
    clip_norm: float | None = field(default=None, metadata={"above": 0})
    """Largest 2-norm of the whole gradient; a larger one is scaled down to it. None: no limit."""
    lr: float = field(default=1e-3, metadata={"above": 0})
    """Highest learning rate, after the warm-up."""
    min_lr: float = field(default=0.0, metadata={"at_least": 0})
    """Learning rate at the last step (schedules linear and cosine)."""
    warmup_steps: int = field(default=0, metadata={"at_least": 0})
    """Steps over which the learning rate rises linearly to `lr`."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Decay of the learning rate after the warm-up; wsd keeps it until the last `decay_steps`."""
    decay_steps: int | None = field(default=None, metadata={"at_least": 1})
    """Steps over which wsd lets the learning rate fall. None: a tenth of all steps."""
    on_resize: Literal["keep", "linear", "sqrt"] = "keep"
    """Rule for continuing with another number of workers. keep: the global batch stays as it was, by other numbers of
    samples and passes; linear, sqrt: micro_batch and accumulate stay, and the learning rate is multiplied with the
    ratio of the global batches, or its root."""
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """AdamW, SGD with momentum, or Muon for matrices and AdamW for vectors and tables of embeddings."""
    beta1: float = field(default=0.9, metadata={"at_least": 0, "below": 1})
    """AdamW: decay of the mean of gradients."""
    beta2: float = field(default=0.95, metadata={"at_least": 0, "below": 1})
    """AdamW: decay of the mean of squared gradients."""
    eps: float = field(default=1e-8, metadata={"above": 0})
    """AdamW: number that is added to the root of the mean of squared gradients."""
    momentum: float = field(default=0.9, metadata={"at_least": 0, "below": 1})
    """SGD and Muon: momentum."""
    kernel: Literal["fused", "foreach", "loop"] = "fused"
    """Computation of AdamW and SGD: one kernel for all parameters, one per operation, or parameter by parameter."""
    weight_decay: float = field(default=0.0, metadata={"at_least": 0})
    """Decay of parameters of two and more dimensions; biases and norms are never decayed."""
    ema: EmaConfig | None = None
    """A moving average of the weights. None: there is none."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """Action on a gradient that is not finite. skip: the step does not change the weights; rollback: return to the
    newest snapshot and continue with the next samples. A snapshot never has values that are not finite."""
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
    """Choice of the best evaluation. None: no snapshot is kept for its score."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Record of a few steps with torch's profiler."""
    tensorboard: str | None = field(default=None, metadata={"not_empty": True})
    """Folder for TensorBoard's event files; a relative one lies in the run's folder on the first worker's node
    (`DTCTL_RUN_DIR`). None: none are written unless the script asks."""
    wandb: str | None = field(default=None, metadata={"not_empty": True})
    """Project of Weights & Biases that metrics go to. None: none."""
    mlflow: str | None = field(default=None, metadata={"not_empty": True})
    """Experiment of MLflow that metrics go to. None: none."""
    exact: Literal["elastic"] | None = None
    """elastic: the same bits on any number of workers (ddp and single only; slower). None: on the same
    number."""
    require_exact: bool = False
    """Fail instead of continuing from a snapshot with other bits than those of a run that was never stopped."""
    deterministic: Literal["auto"] | bool = "auto"
    """Compute on GPUs with kernels that give the same bits each time. true: algorithms, attention, cuBLAS, cuDNN and
    inductor are set so before CUDA starts, training is slower, and an operation without such a kernel is an error.
    auto: true on GPUs with `require_exact` or `exact`, else false."""
    timeout_s: float = field(default=600.0, metadata={"above": 0})
    """Seconds after which a worker that waits for its peers gives up."""
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    """Times and place of snapshots, and how many are kept."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """For the job's own code; `dtctl.runtime.build` reads it strictly."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """For the job's own code."""

    def __post_init__(self) -> None:
        """Refuse keys that exclude each other."""
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are both set; keep one of the two (null unsets the other)")


def load(
    defaults: Mapping[str, Any] | None = None,
    *,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> TrainConfig:
    """Return the configuration of this run.

    Args:
        defaults: values of the script for keys that neither the spec nor the command line sets; keys as in the spec.
        argv: arguments; those that begin with `--train.` are read, the rest is the script's own. None: the process's.
        environ: environment. None: the process's.

    Raises:
        SpecError: a key is unknown, a value has the wrong type or is out of range, or two keys exclude each other.
    """
    environ = os.environ if environ is None else environ
    argv = sys.argv[1:] if argv is None else argv
    layers = [
        ("defaults of the script", dict(defaults or {})),
        (
            names.TRAIN_CONFIG,
            settings.parse_settings_json(environ.get(names.TRAIN_CONFIG, ""), where=names.TRAIN_CONFIG),
        ),
        ("command line", settings.parse_argv_settings(argv)),
    ]
    merged: dict[str, Any] = {}
    for where, layer in layers:
        settings.build(TrainConfig, layer, at="train", where=where)
        merged = settings.merge_settings(_drop_overridden_keys(merged, layer), layer)
    return settings.build(TrainConfig, merged, at="train", where="train")


def _drop_overridden_keys(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer without the keys that a later layer replaces by other keys."""
    set_keys = {key for key, value in upper.items() if value is not None}
    sizes = {"micro_batch", "global_batch", "accumulate"}
    overridden = sizes if len(sizes & set_keys) >= 2 else set()
    if set_keys & {"steps", "epochs"}:
        overridden = overridden | {"steps", "epochs"}
    return {key: value for key, value in lower.items() if key not in overridden}
