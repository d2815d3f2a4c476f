"""Mesh of a run: the workers in each kind of parallelism, and the position of each worker.

    pp    pipeline stages: other blocks on each
    dp    replicas: the same parameters, other samples
    fsdp  sharded replicas: a part of each parameter at rest, other samples
    cp    a part of the tokens, the same samples; parameters are shared as in fsdp
    ep    a part of the experts, which tokens are sent to; all other parameters are shared as in fsdp, other samples
    tp    a part of each matrix, the same samples; of experts, whole ones: ep 4 x tp 2 divides them into 8 parts

Ranks count through tp first, then ep, cp, fsdp, dp and pp: workers that communicate most are neighbours, on one node
where possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from dtctl.errors import PlanError

AXES: Final = ("pp", "dp", "fsdp", "cp", "ep", "tp")
"""Axes from the slowest to the fastest in the order of ranks."""
FILL: Final = -1
"""A degree that takes what the others leave."""
NAMES: Final = ("auto", "single", "ddp", "zero1", "fsdp", "hsdp", "tp", "pipeline")


def _require_valid_degree(value: int) -> None:
    if value == 0 or value < FILL:
        raise ValueError(f"expected at least 1, or -1 for what is left, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of parallelism; their product is the number of workers. One may be -1: what the others leave."""

    dp: int = field(default=1, metadata={"check": _require_valid_degree})
    """Replicas of the model, each of which takes a part of the batch."""
    fsdp: int = field(default=1, metadata={"check": _require_valid_degree})
    """Workers that share the parameters of one replica."""
    cp: int = field(default=1, metadata={"check": _require_valid_degree})
    """Workers that divide the tokens of a sequence."""
    ep: int = field(default=1, metadata={"check": _require_valid_degree})
    """Workers that divide the experts of a mixture."""
    tp: int = field(default=1, metadata={"check": _require_valid_degree})
    """Workers that divide the matrices of a layer (tensor parallelism)."""
    pp: int = field(default=1, metadata={"check": _require_valid_degree})
    """Workers of a pipeline."""

    @property
    def workers(self) -> int:
        """Number of workers of the mesh."""
        return self.pp * self.dp * self.fsdp * self.cp * self.ep * self.tp

    @property
    def data(self) -> int:
        """Number of parts into which a batch is divided."""
        return self.dp * self.fsdp * self.ep

    @property
    def shards(self) -> int:
        """Over how many workers parameters are sharded: they have other samples, or other tokens of the same.

        Experts are divided by ep first, and what a worker of it has is sharded over `expert_shards`.
        """
        return self.expert_shards * self.ep

    @property
    def has_replicas(self) -> bool:
        """Return whether several workers have every part of the state, and no tp, cp or pp divides it."""
        return self.dp > 1 and self.dp * self.fsdp * self.ep == self.workers

    @property
    def expert_parts(self) -> int:
        """Among how many workers experts are divided: those that split matrices have the same tokens, and divide them.

        1 without ep, where every worker has all experts.
        """
        return self.ep * self.tp if self.ep > 1 else 1

    @property
    def expert_shards(self) -> int:
        """Over how many workers a part of the experts is sharded."""
        return self.fsdp * self.cp

    def __str__(self) -> str:
        """Return the degrees above 1, such as `dp 2 x tp 4`; of a single axis only its name, such as `fsdp`."""
        axes = [axis for axis in AXES if getattr(self, axis) > 1]
        if len(axes) < 2:
            return axes[0] if axes else "dp"
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """Position of one worker in a mesh."""

    degrees: Degrees
    rank: int

    @property
    def tp(self) -> int:
        """Position among the workers that split matrices."""
        return self.rank % self.degrees.tp

    @property
    def data(self) -> int:
        """Return which part of every batch this worker takes."""
        degrees = self.degrees
        replica = self.rank // (degrees.tp * degrees.ep * degrees.cp) % (degrees.dp * degrees.fsdp)
        return replica * degrees.ep + self.ep

    @property
    def ep(self) -> int:
        """Position among the workers that divide experts."""
        return self.rank // self.degrees.tp % self.degrees.ep

    @property
    def cp(self) -> int:
        """Position among the workers that divide sequences."""
        return self.rank // (self.degrees.tp * self.degrees.ep) % self.degrees.cp

    @property
    def stage(self) -> int:
        """Position in the pipeline."""
        return self.rank // (self.degrees.tp * self.degrees.cp * self.degrees.data)

    @property
    def stream(self) -> int:
        """Return the rank whose random numbers this worker draws: workers that split a matrix drop the same entries."""
        return self.rank - self.tp

    @property
    def counts(self) -> bool:
        """Return whether this worker is the first of the workers with its samples."""
        return self.tp == self.cp == 0 and self.stage == self.degrees.pp - 1


def resolve_degrees(strategy: str | Mapping[str, int], *, workers: int, per_node: int) -> Degrees:
    """Return the degrees that a strategy means for a number of workers.

    Args:
        strategy: a name of `NAMES`, or degrees by axis: a missing axis is 1, and one degree may be -1 for the remaining
        workers.
        workers: in the whole job.
        per_node: workers of one node, 0 if nodes differ; hsdp shards inside a node, tp splits inside one.

    Raises:
        PlanError: the mesh is not possible; the error names the nearest possible one.
    """
    if not isinstance(strategy, str):
        return _fill_free_degrees(strategy, workers)
    if strategy not in NAMES:
        raise PlanError(
            f"there is no strategy {strategy}", where="train.strategy", hint=f"choose one of {', '.join(NAMES)}"
        )
    if strategy == "single" and workers > 1:
        raise PlanError(
            f"strategy single with {workers} workers would train {workers} separate models",
            where="train.strategy",
            hint="use `ddp`, or one worker",
        )
    if strategy == "fsdp":
        return Degrees(fsdp=workers)
    if strategy == "pipeline":
        return Degrees(pp=workers)
    if strategy in ("hsdp", "tp"):
        if not per_node or workers % per_node:
            fact = f"{workers} workers are no multiple of the {per_node} here" if per_node else "here they differ"
            raise PlanError(
                f"{strategy} needs the same number of workers on every node, and {fact}",
                where="train.strategy",
                hint="give degrees instead, as in {dp: 2, fsdp: -1}",
            )
        if strategy == "tp":
            return Degrees(tp=per_node, dp=workers // per_node)
        if workers == per_node and workers > 1:
            raise PlanError(
                f"hsdp has one replica per node, and all {workers} workers are on one node",
                where="train.strategy",
                hint="use `fsdp`, or give degrees, as in {dp: 2, fsdp: -1}",
            )
        return Degrees(dp=workers // per_node, fsdp=per_node)
    return Degrees(dp=workers)


def _fill_free_degrees(requested: Mapping[str, int], workers: int) -> Degrees:
    for axis, degree in requested.items():
        if axis not in AXES:
            raise PlanError(
                f"there is no axis {axis} in a mesh", where="train.strategy", hint=f"choose one of {', '.join(AXES)}"
            )
        if degree < 1 and degree != FILL:
            raise PlanError(
                f"the degree of {axis} is {degree}, and must be at least 1, or -1 for what is left",
                where=f"train.strategy.{axis}",
            )
    free = [axis for axis, degree in requested.items() if degree == FILL]
    if len(free) > 1:
        raise PlanError(
            f"{' and '.join(free)} are both -1, and only one degree can be what is left", where="train.strategy"
        )
    fixed = math.prod(degree for degree in requested.values() if degree != FILL)
    text = " * ".join(f"{axis} {degree}" for axis, degree in requested.items() if degree != FILL) or "nothing"
    if free and workers % fixed:
        message = f"{workers} workers cannot be divided by {text} = {fixed}, so nothing whole is left for {free[0]}"
        raise PlanError(message, where="train.strategy", hint=_describe_nearest_mesh(requested, workers))
    if not free and fixed != workers:
        message = f"the mesh {text} has {fixed} workers, and the job has {workers}"
        raise PlanError(message, where="train.strategy", hint=_describe_nearest_mesh(requested, workers))
    return Degrees(**{**requested, **({free[0]: workers // fixed} if free else {})})


def _describe_nearest_mesh(requested: Mapping[str, int], workers: int) -> str:
    """Return the mesh of this many workers that is nearest in ratio, over the axes that were asked for, and dp."""
    axes = [axis for axis in AXES if requested.get(axis, 1) != 1 or axis == "dp"]

    def distance(degrees: tuple[int, ...]) -> tuple[float, ...]:
        pairs = [(degree, requested.get(axis, 1)) for axis, degree in zip(axes, degrees, strict=True)]
        # Another number of replicas deviates least from the request, so it counts last.
        main = sum(
            abs(math.log(degree / want))
            for axis, (degree, want) in zip(axes, pairs, strict=True)
            if want != FILL and axis != "dp"
        )
        rest = sum(abs(math.log(degree / max(1, want))) for degree, want in pairs)
        return (main, rest)

    best = min(_generate_factorizations(workers, len(axes)), key=distance)
    return "nearest: {" + ", ".join(f"{axis}: {degree}" for axis, degree in zip(axes, best, strict=True)) + "}"


def _generate_factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of `count` factors."""
    if count == 1:
        yield (number,)
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            for rest in _generate_factorizations(number // factor, count - 1):
                yield (factor, *rest)
