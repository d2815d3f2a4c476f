"""Steps with the best evaluations; their snapshots are kept whatever comes later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtctl.errors import PlanError
from dtctl.train.config import BestConfig


class Best:
    """The best values so far of one score."""

    def __init__(self, config: BestConfig, *, keep: int = 1) -> None:
        """Prepare for the first evaluation.

        Args:
            config: which score, and what is good.
            keep: how many of the best to record.
        """
        self._config, self._keep = config, keep
        self._sign = 1.0 if config.mode == "min" else -1.0
        self._seen: list[tuple[float, int]] = []  # low is good; the best first, of equal ones the earlier

    @property
    def step(self) -> int | None:
        """Step that had the best value; None before the first evaluation."""
        return self._seen[0][1] if self._seen else None

    @property
    def value(self) -> float:
        """Value of that step."""
        return self._sign * self._seen[0][0] if self._seen else 0.0

    @property
    def steps(self) -> list[int]:
        """Return the steps whose snapshots are kept, the best first."""
        return [step for _, step in self._seen[: self._keep]]

    def take(self, step: int, scores: Mapping[str, float]) -> bool:
        """Look at the scores of an evaluation, by the names they are logged under.

        Returns:
            Whether they are among those that are kept.

        Raises:
            PlanError: the score is not among them.
        """
        name = self._config.metric
        if name not in scores:
            raise PlanError(
                f"evaluations have no score {name}", where="train.best.metric", hint=f"there are {', '.join(scores)}"
            )
        value = scores[name]
        if value == value:
            others = [row for row in self._seen if row[1] != step]  # a step may be evaluated again
            self._seen = sorted([*others, (self._sign * value, step)])[: max(1, self._keep)]
        return step in self.steps

    def state(self) -> dict[str, Any]:
        """Return what a snapshot keeps; JSON."""
        seen = [[self._sign * value, step] for value, step in self._seen]
        return {"metric": self._config.metric, "step": self.step, "value": self.value, "seen": seen}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Put back what `state` returned, if it is of the same score."""
        if state is not None and state["metric"] == self._config.metric and state["step"] is not None:
            seen = state.get("seen", [[state["value"], state["step"]]])
            self._seen = [(self._sign * value, step) for value, step in seen]
