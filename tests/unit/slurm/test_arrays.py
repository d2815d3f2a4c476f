"""The tasks of a job array."""

from __future__ import annotations

import pytest

from dtctl.errors import PlanError
from dtctl.slurm import arrays


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("3", [3]),
        ("0-3", [0, 1, 2, 3]),
        ("0-9%2", list(range(10))),
        ("1-7:3,2,2-3%1", [1, 2, 3, 4, 7]),
    ],
)
def test_its_indexes(text: str, indexes: list[int]) -> None:
    assert arrays.parse_array_indexes(text, where="here") == indexes


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "0-4:0", "1,,2", "0-999999999", "1-2-3"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(PlanError) as raised:
        arrays.parse_array_indexes(text, where="here")
    assert raised.value.where == "here"
