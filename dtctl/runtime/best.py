"""Steps with the best evaluations, whose snapshots are kept until the end of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtctl.errors import PlanError
from dtctl.train.config import BestConfig


class BestScores:
    """Best values so far of one score."""

    def __init__(self, config: BestConfig, *, keep: int = 1) -> None:
        """Prepare for the first evaluation.

        Args:
            config: name of the score, and whether small or large values are better.
            keep: number of the best steps to record.
        """
        self._config, self._keep = config, keep
        self._sign = 1.0 if config.mode == "min" else -1.0
        self._seen: list[tuple[float, int]] = []  # the lowest first; among equal values the earliest

    @property
    def step(self) -> int | None:
        """Return the step with the best value; None before the first evaluation."""
        return self._seen[0][1] if self._seen else None

    @property
    def value(self) -> float:
        """Return the value of the best step."""
        return self._sign * self._seen[0][0] if self._seen else 0.0

    @property
    def steps(self) -> list[int]:
        """Return the steps whose snapshots are kept, beginning with the best."""
        return [step for _, step in self._seen[: self._keep]]

    def record_scores(self, step: int, scores: Mapping[str, float]) -> bool:
        """Record the scores of an evaluation, by the names under which they are logged.

        Returns:
            True if the step is among those whose snapshots are kept.

        Raises:
            PlanError: the configured score is not among them.
        """
        name = self._config.metric
        if name not in scores:
            raise PlanError(
                f"evaluations have no score {name}", where="train.best.metric", hint=f"there are {', '.join(scores)}"
            )
        value = scores[name]
        if value == value:
            others = [row for row in self._seen if row[1] != step]  # a step may be evaluated more than once
            self._seen = sorted([*others, (self._sign * value, step)])[: max(1, self._keep)]
        return step in self.steps

    def state(self) -> dict[str, Any]:
        """Return the state for a snapshot; JSON."""
        seen = [[self._sign * value, step] for value, step in self._seen]
        return {"metric": self._config.metric, "step": self.step, "value": self.value, "seen": seen}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state` returned, if it belongs to the same score."""
        if state is not None and state["metric"] == self._config.metric and state["step"] is not None:
            seen = state.get("seen", [[state["value"], state["step"]]])
            self._seen = [(self._sign * value, step) for value, step in seen]
