"""Settings that exclude each other for any model: known from the spec and the number of workers alone."""

from __future__ import annotations

from typing import Final

from dtctl.errors import PlanError
from dtctl.train.config import PipelineConfig, TrainConfig
from dtctl.train.mesh import Degrees

ONE_STAGE: Final = ("gpipe", "1f1b")
"""Schedules with one stage per worker."""
SPLIT_BACKWARD: Final = ("zero-bubble", "zbv")
"""Schedules that compute the gradients of weights apart from those of activations."""


def require(config: TrainConfig, degrees: Degrees, *, accumulate: int | None) -> None:
    """Refuse settings that exclude each other.

    Args:
        config: of the training.
        degrees: the mesh that `config.strategy` means.
        accumulate: forward passes per optimizer step; None if they are not known.

    Raises:
        PlanError: two settings do not go together; names the key to change.
    """
    if config.fsdp.param_dtype == "bf16" and config.precision != "bf16":
        raise PlanError(
            f"parameters in bf16 cannot be combined with precision {config.precision}",
            where="train.fsdp.param_dtype",
            hint="set `train.precision: bf16`, or leave it out",
        )
    if config.shares and (degrees.pp > 1 or config.exact == "elastic"):
        reason = "a pipeline" if degrees.pp > 1 else "exact: elastic"
        raise PlanError(
            f"shares cannot be combined with {reason}, whose micro batches are all of one size",
            where="train.shares",
            hint="leave them out",
        )
    if degrees.pp > 1:
        _require_valid_pipeline(config, degrees, accumulate)
    if degrees.cp > 1:
        if config.precision == "fp16":
            raise PlanError(
                "precision fp16 cannot be combined with cp: gradients in the blocks are multiplied by the number of "
                "workers that share a sequence, so they overflow in steps that one process completes",
                where="train.precision",
                hint="use bf16, or tp or fsdp instead of cp",
            )
        for key, is_set in (("compile", config.compile), ("tp.sequence_parallel", _sequence_parallel(config, degrees))):
            if is_set:
                raise PlanError(f"{key} cannot be combined with cp", where="train.strategy.cp", hint=f"leave {key} out")
    if degrees.ep > 1 and _sequence_parallel(config, degrees):
        raise PlanError(
            "tp.sequence_parallel cannot be combined with ep: the tokens of a layer would be a part of each sample",
            where="train.tp.sequence_parallel",
            hint="leave it out",
        )
    if config.exact == "elastic":
        if degrees.dp != degrees.workers or config.strategy == "zero1":
            name = config.strategy if isinstance(config.strategy, str) else str(degrees)
            raise build_not_elastic_error(
                f"{name} divides the state over the workers, and adds up gradients in its own order"
            )
        if config.ddp.comm_hook != "none":
            raise build_not_elastic_error(f"train.ddp.comm_hook {config.ddp.comm_hook} rounds what each worker sends")


def build_not_elastic_error(reason: str) -> PlanError:
    """Return the error with the reason why a training cannot have the same bits on any number of workers."""
    return PlanError(
        f"exact: elastic is not possible: {reason}",
        where="train.exact",
        hint="remove `exact`: a resume on the same number of workers is exact anyway",
    )


def count_stages_per_worker(options: PipelineConfig) -> int:
    """Return the number of stages of a pipeline on each worker."""
    return options.stages_per_worker or (1 if options.schedule in ONE_STAGE else 2)


def _sequence_parallel(config: TrainConfig, degrees: Degrees) -> bool:
    return config.tp.sequence_parallel and degrees.tp > 1


def _require_valid_pipeline(config: TrainConfig, degrees: Degrees, micro_batches: int | None) -> None:
    name, stages = config.pipeline.schedule, count_stages_per_worker(config.pipeline)
    where = "train.pipeline"
    if degrees.cp > 1:
        raise PlanError(
            "cp cannot be combined with a pipeline: hidden states between stages would be parts of sequences",
            where="train.strategy",
            hint="use cp with fsdp instead of pp",
        )
    if name in ONE_STAGE and stages != 1:
        raise PlanError(f"schedule {name} has one stage per worker, not {stages}", where=where, hint="use interleaved")
    if name == "zbv" and stages != 2:
        raise PlanError(f"schedule zbv has two stages per worker, not {stages}", where=where, hint="use zero-bubble")
    if name in SPLIT_BACKWARD and degrees.shards > 1:
        axis = "ep" if degrees.ep > 1 else "fsdp"
        raise PlanError(
            f"schedule {name} with {axis} gives wrong gradients (torch 2.13): those of weights bypass fully_shard",
            where=where,
            hint="use 1f1b or interleaved, or dp instead of fsdp",
        )
    if _sequence_parallel(config, degrees):
        raise PlanError("sequence parallelism cannot be combined with a pipeline", where="train.tp.sequence_parallel")
    if micro_batches is None:
        return
    if micro_batches < degrees.pp:
        raise PlanError(
            f"{micro_batches} micro batches are fewer than the {degrees.pp} workers of a pipeline, which would hang",
            where=where,
            hint=f"set train.accumulate to {2 * degrees.pp} or more",
        )
    rounds = micro_batches // degrees.pp
    if name in ("interleaved", "zero-bubble") and micro_batches % rounds:
        raise PlanError(
            f"schedule {name} takes micro batches in {rounds} rounds, and {micro_batches} cannot be divided by that",
            where=where,
            hint=f"use a multiple of {degrees.pp}",
        )
