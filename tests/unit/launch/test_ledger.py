"""Where the time went: every moment belongs to exactly one phase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.launch.ledger import PHASES, Ledger


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.floats(0, 1e5)), max_size=20))
def test_the_phases_add_up_to_the_wall_time(steps: list[tuple[str, float]]) -> None:
    clock = Clock()
    ledger = Ledger(clock, begun=49.0)
    for phase, seconds in steps:
        ledger.enter(phase)
        clock.now += seconds
    total = ledger.total_s()
    ledger.enter("stop")
    assert sum(ledger.spent.values()) == pytest.approx(total)
    assert all(spent >= 0 for spent in ledger.spent.values())


def test_what_is_written(tmp_path: Path) -> None:
    clock = Clock()
    ledger = Ledger(clock)
    for phase, at in (("push", 51.0), ("run", 53.5), ("stop", 60.0)):
        clock.now = at
        ledger.enter(phase)
    clock.now = 60.25
    ledger.write(tmp_path / "ledger.json", attempts=2)
    found = json.loads((tmp_path / "ledger.json").read_text())
    assert (found["wall_s"], found["attempts"]) == (10.25, 2)
    assert found["phases_s"] == {"connect": 1.0, "push": 2.5, "start": 0.0, "run": 6.5, "stop": 0.25, "restart": 0.0}
    clock.now = 61.25
    ledger.write(tmp_path / "ledger.json", attempts=2)
    assert json.loads((tmp_path / "ledger.json").read_text())["wall_s"] == 11.25, "it may be written again later"
