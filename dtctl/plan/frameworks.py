"""Translation of `train:` for frameworks that are not dtctl's own: the common part.

A framework takes the keys that it has a counterpart for. A key that was not taken is refused: a setting that silently
has no effect costs more than an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dtctl.errors import PlanError
from dtctl.spec.model import Spec
from dtctl.train.batch import derive_batch_sizes
from dtctl.train.mesh import Degrees, resolve_degrees

OWN = ("model", "data")
"""Keys of `train:` that are for the job's own code, with any framework."""


@dataclass(slots=True, kw_only=True)
class FrameworkSettings:
    """The keys of `train:` that the spec sets and that no framework setting has used yet."""

    spec: Spec
    framework: str
    workers: int
    per_node: int
    """Workers of every node; 0 when nodes differ."""
    remaining: dict[str, Any] = field(default_factory=dict)

    def pop_setting(self, key: str) -> Any:
        """Return the value of a key, or None if the spec does not set it; the key counts as understood."""
        return self.remaining.pop(key, None)

    def take_part(self, key: str, *allowed: str) -> dict[str, Any]:
        """Return the keys of a part of the section, `train.fsdp`; those that are not in `known` are refused if set."""
        part: dict[str, Any] = self.remaining.pop(key, None) or {}
        for name in part:
            if name not in allowed:
                raise self.refused(f"{key}.{name}")
        return part

    def refused(self, key: str, reason: str | None = None) -> PlanError:
        """Return the error for a key without a counterpart."""
        return PlanError(
            reason or f"train.{key} has no counterpart in {self.framework}",
            where=self.spec.written_at(f"train.{key}"),
            hint="remove it, and give it to the program in its own way: `job.args`, `job.env` or a file",
        )

    def refuse_unread_keys(self) -> None:
        """Refuse the keys that the framework has not taken.

        Raises:
            PlanError: a key that is set has no counterpart.
        """
        for key in self.remaining:
            if key not in OWN:
                raise self.refused(key)

    def mesh(self) -> tuple[str, Degrees]:
        """Return the name of the strategy (mesh when degrees are given) and its degrees for these workers.

        Raises:
            PlanError: the workers cannot be divided so.
        """
        strategy = self.pop_setting("strategy") or "auto"
        with self._locating_errors():
            degrees = resolve_degrees(strategy, workers=self.workers, per_node=self.per_node)
        return (strategy if isinstance(strategy, str) else "mesh"), degrees

    def batch(self, workers: int) -> tuple[int | None, int | None, int | None]:
        """Return micro batch, global batch and accumulation, as far as they are set or follow from the others.

        Args:
            workers: those that take different samples.

        Raises:
            PlanError: they contradict each other.
        """
        micro, total, accumulate = (
            self.pop_setting("micro_batch"),
            self.pop_setting("global_batch"),
            self.pop_setting("accumulate"),
        )
        with self._locating_errors():
            return derive_batch_sizes(micro, total, accumulate, workers=workers)

    @contextmanager
    def _locating_errors(self) -> Iterator[None]:
        """Add to errors about a key the place where it is written."""
        try:
            yield
        except PlanError as exc:
            raise PlanError(exc.message, where=self.spec.written_at(exc.where or "train"), hint=exc.hint) from None


def collect_framework_settings(spec: Spec, framework: str, *, workers: int, per_node: int) -> FrameworkSettings:
    """Return the keys that a spec sets, from which a framework of this name takes its own."""
    return FrameworkSettings(
        spec=spec, framework=framework, workers=workers, per_node=per_node, remaining=dict(spec.settings)
    )
