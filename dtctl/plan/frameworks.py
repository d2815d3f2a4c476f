"""What the spec's `train:` section says, taken over by frameworks that are not dtctl's own: what they have in common.

A framework takes the keys that it has a counterpart for. A key that nobody took is refused: a setting that is written
down and then has no effect costs more than an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtctl.errors import PlanError
from dtctl.spec.model import Spec

OWN = ("model", "data")
"""Keys of `train:` that are for the job's own code, whatever the framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Workers along each axis; their product is the number of workers."""

    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def data(self) -> int:
        """Into how many parts a batch is divided."""
        return self.dp * self.fsdp


@dataclass(slots=True, kw_only=True)
class Wanted:
    """The keys of `train:` that the spec sets; a framework takes them one by one."""

    spec: Spec
    framework: str
    workers: int
    per_node: int
    """Workers of every node; 0 when nodes differ."""
    left: dict[str, Any] = field(default_factory=dict)

    def take(self, key: str) -> Any:
        """The value of a key, or None if the spec does not set it; the key counts as understood."""
        return self.left.pop(key, None)

    def take_part(self, key: str, *known: str) -> dict[str, Any]:
        """The keys of a part of the section, `train.fsdp`; those that are not in `known` are refused if set."""
        part: dict[str, Any] = self.left.pop(key, None) or {}
        for name in part:
            if name not in known:
                raise self.refused(f"{key}.{name}")
        return part

    def refused(self, key: str, reason: str | None = None) -> PlanError:
        """The error that says that a key has no counterpart."""
        return PlanError(
            reason or f"train.{key} has no counterpart in {self.framework}",
            where=self.spec.written_at(f"train.{key}"),
            hint="remove it, and give it to the program in its own way: `job.args`, `job.env` or a file",
        )

    def done(self) -> None:
        """Refuse what is left.

        Raises:
            PlanError: a key that is set has no counterpart.
        """
        for key in self.left:
            if key not in OWN:
                raise self.refused(key)

    def shape(self) -> tuple[str, Shape]:
        """Name of the strategy (mesh when degrees are given) and what it means for these workers.

        Raises:
            PlanError: the workers cannot be divided so.
        """
        strategy = self.take("strategy") or "auto"
        if isinstance(strategy, Mapping):
            return "mesh", self._mesh(strategy)
        if strategy == "single" and self.workers > 1:
            message = f"strategy single with {self.workers} workers would train {self.workers} models apart"
            raise self.refused("strategy", message)
        if strategy == "fsdp":
            return strategy, Shape(fsdp=self.workers)
        if strategy == "pipeline":
            return strategy, Shape(pp=self.workers)
        if strategy in ("hsdp", "tp") and not self.per_node:
            raise self.refused("strategy", f"{strategy} needs the same number of workers on every node")
        if strategy == "hsdp":
            return strategy, Shape(fsdp=self.per_node, dp=self.workers // self.per_node)
        if strategy == "tp":
            return strategy, Shape(tp=self.per_node, dp=self.workers // self.per_node)
        return strategy, Shape(dp=self.workers)

    def _mesh(self, degrees: Mapping[str, int]) -> Shape:
        free = [axis for axis, degree in degrees.items() if degree < 0]
        fixed = math.prod(degree for degree in degrees.values() if degree > 0)
        if len(free) > 1 or (self.workers % fixed if free else self.workers != fixed):
            written = " * ".join(f"{axis} {degree}" for axis, degree in degrees.items())
            raise PlanError(
                f"{self.workers} workers are not {written}",
                where=self.spec.written_at("train.strategy"),
                hint="the product of the degrees is the number of workers; one of them may be -1, for what is left",
            )
        return Shape(**{**degrees, **({free[0]: self.workers // fixed} if free else {})})

    def batch(self, data: int) -> tuple[int | None, int | None, int | None]:
        """Micro batch, global batch and accumulation, as far as they are set or follow from those that are.

        Args:
            data: into how many parts a batch is divided.

        Raises:
            PlanError: they contradict each other.
        """
        micro, total, steps = self.take("micro_batch"), self.take("global_batch"), self.take("accumulate")
        if micro and total and total % (micro * data):
            message = f"a global batch of {total} is no multiple of micro batch {micro} on {data} data parallel workers"
            raise self.refused("global_batch", message)
        if micro and total:
            found = total // (micro * data)
            if steps and steps != found:
                message = f"accumulate is {steps}, and {total} samples are {found} micro batches of {micro} on {data}"
                raise self.refused("accumulate", message)
            return micro, total, found
        if micro and steps:
            return micro, micro * steps * data, steps
        if total and total % (data * (steps or 1)):
            message = f"a global batch of {total} cannot be divided by {data * (steps or 1)}"
            raise self.refused("global_batch", message)
        return micro, total, steps


def wanted(spec: Spec, framework: str, *, workers: int, per_node: int) -> Wanted:
    """What a spec sets, for a framework of this name to take."""
    found = spec.train.settings() if spec.train is not None else {}
    return Wanted(spec=spec, framework=framework, workers=workers, per_node=per_node, left=dict(found))
