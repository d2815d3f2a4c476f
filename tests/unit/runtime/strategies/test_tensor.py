"""Plans for tensor parallelism: recognized by names, given by patterns, refused where they do not fit."""

from __future__ import annotations

import pytest
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.strategies import blocks
from dtctl.runtime.strategies.tensor import require_divisible_modules, resolve_split_styles
from tests.facts import raises


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 6
        self.q_proj, self.o_proj = nn.Linear(12, 12), nn.Linear(12, 12)
        self.mlp = nn.ModuleDict({"up": nn.Linear(12, 24), "down": nn.Linear(24, 12)})
        self.odd = nn.Linear(12, 12)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(12, 9)


def plan(given: dict[str, str]) -> dict[str, str]:
    model = Model()
    return resolve_split_styles(model, blocks.find_repeated_blocks(model), given)


def test_blocks_are_recognized_by_the_names_of_their_matrices() -> None:
    one = {"q_proj": "colwise", "o_proj": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"}
    assert plan({}) == {f"blocks.{index}.{name}": style for index in range(2) for name, style in one.items()}


def test_later_patterns_win_and_replicate_takes_out() -> None:
    found = plan({"blocks.*": "colwise", "*.odd": "replicate", "*.*_proj": "rowwise", "table": "embedding"})
    assert found["blocks.0.q_proj"] == found["blocks.1.o_proj"] == "rowwise"
    assert found["blocks.0.mlp.up"] == "colwise"
    assert found["table"] == "embedding"
    assert "blocks.0.odd" not in found


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        (
            {"blocks.*.q": "colwise"},
            "no Linear or Embedding of the model is named blocks.*.q",
            "the nearest is blocks.",
        ),
        ({"blocks.*.odd": "column"}, "column is not a way to split a matrix", "colwise"),
    ],
)
def test_unknown_names_are_refused(given: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(given)
    assert caught.value.message == message
    assert hint in (caught.value.hint or "")


def test_a_model_without_known_names_needs_a_plan() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with raises(PlanError, "names split"):
        resolve_split_styles(model, blocks.find_repeated_blocks(model), {})


@pytest.mark.parametrize(
    ("given", "degree", "message"),
    [
        ({"blocks.*.mlp.up": "colwise"}, 5, "blocks.0.mlp.up 24 5"),
        ({"blocks.*.mlp.down": "rowwise"}, 5, "blocks.0.mlp.down 24 5"),
        ({"table": "embedding"}, 2, "table 9 2"),
        ({"table": "colwise"}, 3, "table Embedding colwise"),
        ({"out": "embedding"}, 3, "Embedding embedding"),
        ({"*.q_proj": "colwise"}, 4, "6 Block.num_heads 4"),
    ],
)
def test_what_cannot_be_divided_is_refused(given: dict[str, str], degree: int, message: str) -> None:
    with raises(PlanError, message):
        require_divisible_modules(Model(), plan(given), degree)


def test_what_can_be_divided_passes() -> None:
    require_divisible_modules(Model(), plan({}), 3)
