"""Which worker has which stage of a pipeline."""

from __future__ import annotations

from dtctl.runtime.strategies.pipeline import assign_stage_owners


def test_stages_go_round_or_there_and_back() -> None:
    assert assign_stage_owners("1f1b", 3, 1) == [0, 1, 2]
    assert assign_stage_owners("interleaved", 2, 2) == [0, 1, 0, 1]
    assert assign_stage_owners("zbv", 3, 2) == [0, 1, 2, 2, 1, 0]
