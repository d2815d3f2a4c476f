"""Interface of a run that live recovery needs; the Trainer has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from dtctl.runtime.best import Best
from dtctl.runtime.data_loading.feed import Feed
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.ema import Ema
from dtctl.runtime.exactness.account import Account
from dtctl.runtime.exactness.record import StepRecorder
from dtctl.runtime.hooks import Hooks
from dtctl.runtime.optim import LearningRate
from dtctl.runtime.precision import LossScale
from dtctl.runtime.snapshot.saver import Saver
from dtctl.runtime.snapshot.state import Configured
from dtctl.runtime.step import StepResult
from dtctl.runtime.strategies import Strategy
from dtctl.runtime.telemetry.report import Report
from dtctl.train.batch import Batch
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Coordinate


class Training(Protocol):
    """A training on one worker; attributes as the Trainer describes them."""

    config: TrainConfig
    worker: Worker
    place: Coordinate
    model: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: list[torch.Tensor]
    configured: Configured
    rate: LearningRate
    strategy: Strategy
    ema: Ema | None
    loss_scale: LossScale | None
    best: Best | None
    feed: Feed
    hooks: Hooks
    report: Report
    recorder: StepRecorder
    saver: Saver
    extra_state: dict[str, Any]
    elastic: bool
    samples: int
    asked: Batch
    step: int
    steps: int
    position: int
    newest: StepResult | None
    unused: Sequence[int]
    ready: Callable[[Sequence[int]], None] | None
    is_torn: bool
    is_owed: bool
    constants: int | None
    """Checksum of the model's buffers when training began, by `recovery.buffers_checksum`."""
    scale_before: Mapping[str, Any]
    """The loss scale's state before the step."""

    @property
    def account(self) -> Account:
        """Return what the program was before its first step."""
        ...

    def counters(self) -> dict[str, Any]:
        """Return what a snapshot keeps of the loop itself; JSON."""
        ...

    def use(self, sizes: Batch) -> None:
        """Go on with these sizes of a batch."""
        ...

    def let_go(self) -> None:
        """Unwrap the model, before the process group is left."""
        ...

    def conclude(self, unused: Sequence[int] | None) -> None:
        """Take the step that this worker was interrupted in when it was ready to, or none."""
        ...

    def spread_again(self) -> None:
        """Wrap the model for a new process group; collective."""
        ...
