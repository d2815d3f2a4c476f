"""Arguments of Megatron-LM's programs (`pretrain_gpt.py` and its like), made from `train:`.

Source: megatron/training/arguments.py and the dataclasses that it takes its options from (TransformerConfig,
ModelParallelConfig, TrainingConfig, SchedulerConfig, CheckpointConfig), read at commit d98e8a6 (August 2026).
"""

from __future__ import annotations

from dtctl.plan.frameworks import FrameworkSettings
from dtctl.train.mesh import Degrees

PLAIN = {
    "lr": "--lr",
    "min_lr": "--min-lr",
    "warmup_steps": "--lr-warmup-iters",
    "decay_steps": "--lr-wsd-decay-iters",
    "steps": "--train-iters",
    "weight_decay": "--weight-decay",
    "beta1": "--adam-beta1",
    "beta2": "--adam-beta2",
    "eps": "--adam-eps",
    "momentum": "--sgd-momentum",
    "clip_norm": "--clip-grad",
    "seed": "--seed",
    "log_every": "--log-interval",
    "eval_every": "--eval-interval",
}
"""Key of `train:` -> option with the same meaning and unit."""
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}  # Megatron's adam decays weights as AdamW does


def arguments(settings: FrameworkSettings) -> tuple[str, ...]:
    """The arguments, in the order of Megatron's own examples: parallelism, batch, training, precision, checkpoints.

    Raises:
        PlanError: a key of `train:` has no counterpart, or the workers cannot be divided so.
    """
    name, degrees = settings.mesh()
    args = [*_parallel(settings, name, degrees), *_batch(settings, degrees)]
    for key, option in PLAIN.items():
        value = settings.take(key)
        if value is not None:
            args += [option, str(value)]
    if schedule := settings.take("schedule"):
        args += ["--lr-decay-style", SCHEDULES[schedule]]
        if schedule == "wsd":
            args += ["--lr-wsd-decay-style", "minus_sqrt"]  # as dtctl.runtime falls
    if optimizer := settings.take("optimizer"):
        if optimizer not in OPTIMIZERS:
            raise settings.refused("optimizer", f"optimizer {optimizer} has no counterpart in {settings.framework}")
        args += ["--optimizer", OPTIMIZERS[optimizer]]
    args += _memory(settings) + _checkpoints(settings)
    settings.refuse_remaining()
    return tuple(args)


def _parallel(settings: FrameworkSettings, name: str, degrees: Degrees) -> list[str]:
    args = ["--tensor-model-parallel-size", str(degrees.tp), "--pipeline-model-parallel-size", str(degrees.pp)]
    if degrees.cp > 1:
        args += ["--context-parallel-size", str(degrees.cp)]
    tensor = settings.take_part("tp", "sequence_parallel")
    if tensor.get("sequence_parallel") and degrees.tp > 1:
        args.append("--sequence-parallel")
    if name == "zero1":
        args.append("--use-distributed-optimizer")
    if degrees.fsdp > 1:
        if degrees.dp > 1:
            raise settings.refused("strategy", "dp beside fsdp (hsdp) is not an option of Megatron that dtctl knows")
        part = settings.take_part("fsdp", "reshard_after_forward")
        shards = "optim_grads_params" if part.get("reshard_after_forward", True) else "optim_grads"
        args += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", shards]
    pipeline = settings.take_part("pipeline", "schedule", "stages_per_worker")
    schedule, stages = pipeline.get("schedule", "1f1b"), pipeline.get("stages_per_worker")
    if schedule not in ("1f1b", "interleaved"):
        raise settings.refused("pipeline.schedule", f"Megatron has 1f1b and interleaved pipelines, and not {schedule}")
    if schedule == "interleaved" or stages:
        args += ["--num-virtual-stages-per-pipeline-rank", str(stages or 2)]
    return args


def _batch(settings: FrameworkSettings, degrees: Degrees) -> list[str]:
    micro, total, _ = settings.batch(degrees.data)
    args = ["--micro-batch-size", str(micro)] if micro else []
    return args + (["--global-batch-size", str(total)] if total else [])


def _memory(settings: FrameworkSettings) -> list[str]:
    precision = settings.take("precision") or "fp32"
    args = [] if precision == "fp32" else [f"--{precision}"]
    checkpointing = settings.take("checkpointing") or "none"
    if checkpointing == "full":
        args += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    elif checkpointing == "selective":
        args += ["--recompute-granularity", "selective"]
    elif checkpointing != "none":
        raise settings.refused("checkpointing", f"Megatron cannot recompute every {checkpointing}th block")
    return args


def _checkpoints(settings: FrameworkSettings) -> list[str]:
    part = settings.take_part("snapshot", "dir", "every_steps")
    args = ["--save", part["dir"], "--load", part["dir"]] if part.get("dir") else []
    return args + (["--save-interval", str(part["every_steps"])] if part.get("every_steps") else [])
