"""Memory that `dtctl advise` predicts beside what a training of that model takes."""

from __future__ import annotations

import pytest

from dtctl.advise.measure import measure
from dtctl.advise.model import transformer


@pytest.mark.torch
@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)])
def test_predicted_memory_is_what_a_training_takes(strategy: str, workers: int) -> None:
    model = transformer(layers=6, hidden=384, heads=6, vocab=1024, seq=128, tied=workers > 1)
    assert measure(model, strategy=strategy, workers=workers, micro_batch=2).off == pytest.approx(0, abs=0.10)
