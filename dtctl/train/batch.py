"""The three sizes of a batch, and the length of a training: how they follow from each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dtctl.errors import PlanError
from dtctl.train.config import TrainConfig

DEFAULT_MICRO_BATCH: Final = 8
ENDLESS: Final = 1 << 62
"""Number of samples of a data set without an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The three sizes of a batch, and the number of workers that makes them agree."""

    micro: int
    """Samples per worker and forward pass, times the worker's share."""
    accumulate: int
    """Forward passes per optimizer step."""
    world_size: int
    """Workers that take different samples; all, unless some share a model."""
    shares: tuple[int, ...] = ()
    """Number of times `micro` that each of them takes, if they differ; see `train.shares`."""

    @property
    def parts(self) -> int:
        """Micro batches of one forward pass of all workers, by their shares."""
        return sum(self.shares) or self.world_size

    @property
    def total(self) -> int:
        """Samples per optimizer step over all workers."""
        return self.micro * self.parts * self.accumulate

    def describe(self) -> str:
        """Return the sizes in words."""
        parts = f"({' + '.join(map(str, self.shares))})" if self.shares else self.world_size
        return f"global batch {self.total} = {self.micro} x {parts} x {self.accumulate}"


def compute_batch_sizes(
    config: TrainConfig, world_size: int, *, stages: int = 1, shares: tuple[int, ...] = ()
) -> BatchSizes:
    """Return sizes with global_batch = micro_batch * workers * accumulate, where a worker counts as often as its share.

    Args:
        config: of the training.
        world_size: workers that take different samples.
        stages: workers of a pipeline, which needs several micro batches.
        shares: of these workers, if they differ.

    Raises:
        PlanError: the sizes that are set are impossible with this number of workers.
    """
    accumulate = _in_pipeline(config, stages) if stages > 1 else config.accumulate
    parts = sum(shares) or world_size
    micro, _, accumulate = derive_batch_sizes(config.micro_batch, config.global_batch, accumulate, workers=parts)
    if config.global_batch is not None and micro is None:
        accumulate = accumulate or 1
        micro = config.global_batch // (parts * accumulate)
    return BatchSizes(
        micro=micro or DEFAULT_MICRO_BATCH, accumulate=accumulate or 1, world_size=world_size, shares=shares
    )


def derive_batch_sizes(
    micro: int | None, total: int | None, accumulate: int | None, *, workers: int
) -> tuple[int | None, int | None, int | None]:
    """Return micro batch, global batch and accumulation: those that are set, and the third that follows from two.

    Args:
        micro: samples per worker and forward pass, if set.
        total: samples per optimizer step over all workers, if set.
        accumulate: forward passes per optimizer step, if set.
        workers: those that take different samples.

    Raises:
        PlanError: they contradict each other, or the workers cannot divide the global batch.
    """
    if total is None:
        return micro, micro * workers * accumulate if micro and accumulate else None, accumulate
    if micro is None:
        parts = workers * (accumulate or 1)
        _require_divisible_batch(total, parts, f"{workers} workers * accumulate {accumulate or 1}")
        return total // parts if accumulate else None, total, accumulate
    if accumulate is None:
        _require_divisible_batch(total, micro * workers, f"micro_batch {micro} * {workers} workers")
        return micro, total, total // (micro * workers)
    if micro * workers * accumulate != total:
        raise PlanError(
            f"micro_batch {micro} * {workers} workers * accumulate {accumulate} is {micro * workers * accumulate}, "
            f"and global_batch is {total}",
            where="train.global_batch",
            hint="leave one of the three out and it is derived",
        )
    return micro, total, accumulate


def _in_pipeline(config: TrainConfig, stages: int) -> int | None:
    """Return the number of micro batches of a step in a pipeline; None if the two other sizes determine it.

    Raises:
        PlanError: the two settings for it contradict each other.
    """
    micro_batches, accumulate = config.pipeline.micro_batches, config.accumulate
    if micro_batches and accumulate and micro_batches != accumulate:
        raise PlanError(
            f"pipeline.micro_batches is {micro_batches} and accumulate is {accumulate}, and both set the same number",
            where="train.pipeline.micro_batches",
            hint="keep one of the two",
        )
    if micro_batches or accumulate or (config.micro_batch and config.global_batch):
        return micro_batches or accumulate
    return 2 * stages


def _require_divisible_batch(total: int, parts: int, made_of: str) -> None:
    if total % parts:
        below, above = total // parts * parts, (total // parts + 1) * parts
        candidates = f"{below} or {above}" if below else str(above)
        raise PlanError(
            f"global_batch {total} cannot be divided by {made_of} = {parts}",
            where="train.global_batch",
            hint=f"the nearest that can: {candidates}",
        )


def compute_training_length(config: TrainConfig, *, samples: int, batch: BatchSizes) -> tuple[int, int]:
    """Return the number of optimizer steps of the training, and the number of samples after which it ends.

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
