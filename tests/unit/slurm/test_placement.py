"""Which workers are on which node of a job."""

from __future__ import annotations

import pytest

from dtctl.slurm import placement


@pytest.mark.parametrize(("slots", "text"), [([8], "1x8"), ([8, 8, 4], "2x8,1x4"), ([2, 4, 2], "1x2,1x4,1x2")])
def test_it_is_written_and_read(slots: list[int], text: str) -> None:
    assert placement.to_text(slots) == text
    assert placement.from_text(text) == slots


def test_srun_numbers_the_tasks_of_each_component() -> None:
    nodes = ["a", "b", "c", "d"]
    assert placement.first_ranks(nodes, [2, 2, 2, 2]) == dict.fromkeys(nodes, 0)
    assert placement.first_ranks(nodes, [4, 2, 2, 1]) == {"a": 0, "b": 4, "c": 4, "d": 8}
    assert placement.first_ranks(nodes, [4, 2]) == {}
