"""Settings of a run on which all workers have agreed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dtctl.runtime.distributed.worker import Worker
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Coordinate


@dataclass(slots=True, kw_only=True)
class TrainingSettings:
    """Settings of a run, after all workers have agreed on them."""

    config: TrainConfig
    """Configuration, with the chosen name in place of `strategy: auto`."""
    worker: Worker
    place: Coordinate
    """Position of this worker in the mesh."""
    samples: int
    """Size of the data set."""
    chosen: dict[str, Any] | None
    """Record of the choice of a strategy, JSON; None if there was none."""
    circumstances: dict[str, Any] = field(default_factory=dict)
    """Facts that a snapshot keeps to explain differences, JSON."""

    is_elastic: bool = field(init=False)
    """True if the bits are the same on any number of workers."""
    averaged_replicas: int = field(init=False)
    """Number of workers over which gradients are averaged; 1 with `exact: elastic`, where they are added up."""

    def __post_init__(self) -> None:
        """Compute the values that every step needs."""
        self.is_elastic = self.config.exact == "elastic"
        self.averaged_replicas = 1 if self.is_elastic else self.place.degrees.data
