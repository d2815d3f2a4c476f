"""Memory that `dtctl advise` predicts beside what a training of that model takes, and what torch's tracker counts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dtctl.advise.measure import measure_training_memory, run_memory_tracker
from dtctl.advise.model import build_decoder_model


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 1), ("ddp", 2), ("fsdp", 4)])
def test_predicted_memory_is_what_a_training_takes(strategy: str, workers: int) -> None:
    model = build_decoder_model(layers=6, hidden=384, heads=6, vocab=1024, seq=128, tied=workers > 1)
    found = measure_training_memory(model, strategy=strategy, workers=workers, micro_batch=2)
    assert found.relative_error == pytest.approx(0, abs=0.10)
    assert found.tracked == pytest.approx(found.measured, rel=0.12), found.untracked


ODD = """
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, tokens):
        found = self.table(tokens)
        return found if found.sum().item() < 1e9 else -found
"""


def settings(**others: Any) -> dict[str, Any]:
    train = {"strategy": "ddp", "micro_batch": 2}
    return {"module": None, "shape": {}, "seq": 4, "workers": 2, "train": train, **others}


@pytest.mark.slow
@pytest.mark.torch
def test_what_the_tracker_cannot_follow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.chdir(tmp_path)
    tracked, why = run_memory_tracker(settings(module="odd:Odd"), sys.executable)
    assert tracked is None
    assert why is not None
    assert why.startswith("DataDependentOutputException")
    nothing, missing = run_memory_tracker(settings(module="even:Even"), sys.executable)
    assert nothing is None
    assert missing == "ValueError: module even cannot be imported: No module named 'even'"
