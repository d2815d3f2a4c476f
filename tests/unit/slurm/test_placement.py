"""Which workers are on which node of a job."""

from __future__ import annotations

import pytest

from dtctl.slurm import placement
from dtctl.slurm.placement import Component


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([Component(1, 8)], "1x8"),
        ([Component(2, 8), Component(1, 4)], "2x8,1x4"),
        ([Component(1, 2), Component(1, 4), Component(1, 2)], "1x2,1x4,1x2"),
        ([Component(2, 8), Component(2, 8)], "2x8,2x8"),  # alike but for their resources
    ],
)
def test_it_is_written_and_read(parts: list[Component], text: str) -> None:
    assert placement.to_text(parts) == text
    assert placement.from_text(text) == parts


def test_nodes_that_ask_for_the_same_are_a_component() -> None:
    nodes = [(8, "gpu:8"), (8, "gpu:8"), (8, "gpu:a100:8"), (4, None)]
    parts = placement.components(nodes)
    assert parts == [Component(2, 8), Component(1, 8), Component(1, 4)]
    assert placement.slots(parts) == [8, 8, 8, 4]


def test_srun_numbers_the_tasks_of_each_component() -> None:
    nodes = ["a", "b", "c", "d"]
    assert placement.first_ranks(nodes, [Component(4, 2)]) == dict.fromkeys(nodes, 0)
    assert placement.first_ranks(nodes, placement.from_text("1x4,2x2,1x1")) == {"a": 0, "b": 4, "c": 4, "d": 8}
    assert placement.first_ranks(nodes, placement.from_text("2x2,2x2")) == {"a": 0, "b": 0, "c": 4, "d": 4}
    assert placement.first_ranks(nodes, [Component(1, 4), Component(1, 2)]) == {}
