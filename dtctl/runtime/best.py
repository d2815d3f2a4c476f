"""Which step had the best evaluation; its snapshot is kept whatever comes later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtctl.errors import PlanError
from dtctl.runtime.config import BestConfig


class Best:
    """The best value so far of one score.

    Attributes:
        step: that had it; None before the first evaluation.
        value: that it had.
    """

    def __init__(self, config: BestConfig) -> None:
        self._config = config
        self.step: int | None = None
        self.value = 0.0

    def take(self, step: int, scores: Mapping[str, float]) -> bool:
        """Look at the scores of an evaluation, by the names they are logged under. Returns whether they are the best.

        Raises:
            PlanError: the score is not among them.
        """
        name = self._config.metric
        if name not in scores:
            raise PlanError(
                f"evaluations have no score {name}", where="train.best.metric", hint=f"there are {', '.join(scores)}"
            )
        value = scores[name]
        better = value < self.value if self._config.mode == "min" else value > self.value
        if value == value and (self.step is None or better):
            self.step, self.value = step, value
            return True
        return False

    def state(self) -> dict[str, Any]:
        """What a snapshot keeps; JSON."""
        return {"metric": self._config.metric, "step": self.step, "value": self.value}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Put back what `state` returned, if it is of the same score."""
        if state is not None and state["metric"] == self._config.metric:
            self.step, self.value = state["step"], state["value"]
