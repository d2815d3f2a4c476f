"""Six of the signals that `make soak` sends fifty of: see stopping.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault import stopping

pytestmark = pytest.mark.torch


@pytest.mark.slow
def test_a_signal_in_any_phase_ends_with_a_snapshot_from_which_training_goes_on_exactly(tmp_path: Path) -> None:
    (tmp_path / "straight").mkdir()
    (tmp_path / "stopped").mkdir()
    stopping.write(tmp_path / "straight", 92)
    expected = stopping.finish(tmp_path / "straight")
    found, digest = stopping.stop_again_and_again(tmp_path / "stopped", count=6, seed=1, steps=92)
    for row in found:
        assert row.good, f"{row.phase}, {row.who}: {row.code}, {row.worker_codes}, step {row.step}\n{row.err[-3000:]}"
    assert digest == expected
