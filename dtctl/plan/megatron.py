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


def arguments(wanted: FrameworkSettings) -> tuple[str, ...]:
    """The arguments, in the order of Megatron's own examples: parallelism, batch, training, precision, checkpoints.

    Raises:
        PlanError: a key of `train:` has no counterpart, or the workers cannot be divided so.
    """
    name, degrees = wanted.mesh()
    found = [*_parallel(wanted, name, degrees), *_batch(wanted, degrees)]
    for key, option in PLAIN.items():
        value = wanted.take(key)
        if value is not None:
            found += [option, str(value)]
    if schedule := wanted.take("schedule"):
        found += ["--lr-decay-style", SCHEDULES[schedule]]
        if schedule == "wsd":
            found += ["--lr-wsd-decay-style", "minus_sqrt"]  # as dtctl.runtime falls
    if optimizer := wanted.take("optimizer"):
        found += ["--optimizer", OPTIMIZERS[optimizer]]
    found += _memory(wanted) + _checkpoints(wanted)
    wanted.done()
    return tuple(found)


def _parallel(wanted: FrameworkSettings, name: str, degrees: Degrees) -> list[str]:
    found = ["--tensor-model-parallel-size", str(degrees.tp), "--pipeline-model-parallel-size", str(degrees.pp)]
    if degrees.cp > 1:
        found += ["--context-parallel-size", str(degrees.cp)]
    tensor = wanted.take_part("tp", "sequence_parallel")
    if tensor.get("sequence_parallel") and degrees.tp > 1:
        found.append("--sequence-parallel")
    if name == "zero1":
        found.append("--use-distributed-optimizer")
    if degrees.fsdp > 1:
        if degrees.dp > 1:
            raise wanted.refused("strategy", "dp beside fsdp (hsdp) is not an option of Megatron that dtctl knows")
        part = wanted.take_part("fsdp", "reshard_after_forward")
        what = "optim_grads_params" if part.get("reshard_after_forward", True) else "optim_grads"
        found += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", what]
    pipeline = wanted.take_part("pipeline", "schedule", "stages_per_worker")
    schedule, stages = pipeline.get("schedule", "1f1b"), pipeline.get("stages_per_worker")
    if schedule not in ("1f1b", "interleaved"):
        raise wanted.refused("pipeline.schedule", f"Megatron has 1f1b and interleaved pipelines, and not {schedule}")
    if schedule == "interleaved" or stages:
        found += ["--num-virtual-stages-per-pipeline-rank", str(stages or 2)]
    return found


def _batch(wanted: FrameworkSettings, degrees: Degrees) -> list[str]:
    micro, total, _ = wanted.batch(degrees.data)
    found = ["--micro-batch-size", str(micro)] if micro else []
    return found + (["--global-batch-size", str(total)] if total else [])


def _memory(wanted: FrameworkSettings) -> list[str]:
    precision = wanted.take("precision") or "fp32"
    found = [] if precision == "fp32" else [f"--{precision}"]
    checkpointing = wanted.take("checkpointing") or "none"
    if checkpointing == "full":
        found += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    elif checkpointing == "selective":
        found += ["--recompute-granularity", "selective"]
    elif checkpointing != "none":
        raise wanted.refused("checkpointing", f"Megatron cannot recompute every {checkpointing}th block")
    return found


def _checkpoints(wanted: FrameworkSettings) -> list[str]:
    part = wanted.take_part("snapshot", "dir", "every_steps")
    found = ["--save", part["dir"], "--load", part["dir"]] if part.get("dir") else []
    return found + (["--save-interval", str(part["every_steps"])] if part.get("every_steps") else [])
