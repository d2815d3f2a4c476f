"""State of the step under way, by which live recovery completes or undoes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtctl.runtime.step import StepResult


@dataclass(slots=True, kw_only=True)
class StepTransaction:
    """State of the newest step of one run on this worker."""

    newest: StepResult | None = None
    """Result of the newest step; None before the first one."""
    unused: Sequence[int] = ()
    """Numbers of the parameters without a gradient on any worker in the newest step."""
    ready: Callable[[Sequence[int]], None] | None = None
    """Function that takes the step under way, given the value of `unused`; None if anything else is missing."""
    is_torn: bool = False
    """True while the state is being changed."""
    is_owed: bool = False
    """True if the actions due after the newest step are not done yet."""
    constants: int | None = None
    """Checksum of the model's buffers at the beginning of training, by `recovery.compute_buffers_checksum`."""
    scale_before: Mapping[str, Any] = field(default_factory=dict)
    """State of the loss scale before the step under way."""
