"""The repeated blocks of a model are found, or named."""

from __future__ import annotations

import pytest
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.strategies import blocks
from tests.facts import raises


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.few = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.body = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(9, 9) for _ in range(3))})
        self.one = nn.ModuleList([nn.Linear(100, 100)])
        self.steps = nn.Sequential(nn.Linear(50, 50), nn.ReLU())


def test_the_largest_list_is_found() -> None:
    found = blocks.find_repeated_blocks(Layered())
    assert found is not None
    assert found.name == "body.layers"
    assert len(found) == len(found.modules) == 3


def test_a_model_of_steps_is_its_own_list() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    found = blocks.find_repeated_blocks(model)
    assert found is not None
    assert (found.name, found.container) == ("", model)


def test_nothing_repeats() -> None:
    assert blocks.find_repeated_blocks(nn.Linear(2, 2)) is None


def test_blocks_may_be_named() -> None:
    found = blocks.find_repeated_blocks(Layered(), "steps")
    assert found is not None
    assert len(found) == 2


@pytest.mark.parametrize("name", ["layers", "one.0"])
def test_a_wrong_name_is_refused_with_those_that_there_are(name: str) -> None:
    with raises(PlanError, f"{name}") as caught:
        blocks.find_repeated_blocks(Layered(), name)
    assert caught.value.hint == "it has few, body.layers, one, steps"
