"""Records of a few steps: where the configuration says, or when a signal asks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.runtime.conftest import Make, squared

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's profiler warns of itself


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DTCTL_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run" / "profile"


def backwards(path: Path) -> int:
    """How many steps a record holds."""
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events)


def test_steps_that_were_asked_for_are_recorded(make: Make, folder: Path) -> None:
    make({"profile": {"start": 4, "steps": 2, "memory": True}}).run()
    assert sorted(path.name for path in folder.iterdir()) == ["top-rank0-step4.txt", "trace-rank0-step4.json"]
    assert backwards(folder / "trace-rank0-step4.json") == 2
    alone, _, stacks = (folder / "top-rank0-step4.txt").read_text().partition("Source Location")
    assert "aten::" in alone
    assert "test_profile.py" in stacks or "loop.py" in stacks  # whose line it was


def test_a_signal_asks_at_any_time_and_the_end_writes_what_there_is(make: Make, folder: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if trainer.step in (2, 10):
            os.kill(os.getpid(), signal.SIGUSR2)
        return squared(model, batch)

    before = signal.getsignal(signal.SIGUSR2)
    trainer = make({"profile": {"steps": 3}}, loss=loss)
    trainer.run()
    assert sorted(path.name for path in folder.glob("trace-*")) == ["trace-rank0-step12.json", "trace-rank0-step4.json"]
    assert backwards(folder / "trace-rank0-step4.json") == 3
    assert backwards(folder / "trace-rank0-step12.json") == 1
    assert signal.getsignal(signal.SIGUSR2) is before


def test_nothing_is_recorded_unasked(make: Make, folder: Path) -> None:
    make().run()
    assert not folder.exists()


def test_measuring_communication_changes_nothing(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    ends = []
    for pairs in (0, 2):
        trainer = make({"profile": {"communication": pairs}, "snapshot": {"dir": str(pairs)}})
        trainer.run()
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert "communication is " in capsys.readouterr().out
