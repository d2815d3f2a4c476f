"""One worker: nothing is spread, nothing is exchanged."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn


class Single:
    """The model as it is."""

    name = "single"
    has_warm_up = False

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def accumulating(self) -> AbstractContextManager[None]:
        """Nothing to hold back."""
        return nullcontext()
