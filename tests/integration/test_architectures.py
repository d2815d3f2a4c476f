"""Drawn architectures are divided by tp into what one process trains, or refused; never trained into something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.facts import missing
from tests.integration.architectures_worker import drawn

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("architectures_worker.py")
LIMIT = 1e-12


def trained(folder: Path, numbers: list[int], mesh: dict[str, int] | None, workers: int) -> dict[int, Any]:
    folder.mkdir()
    argv = [WORKER, json.dumps(numbers), json.dumps(mesh), folder]
    ended = forked.launch(argv, workers, cwd=folder)
    assert ended.code == 0, ended.output[-6000:]
    found: dict[int, Any] = torch.load(folder / "found.pt")
    return found


def verdicts(folder: Path, numbers: list[int], mesh: dict[str, int], workers: int) -> dict[int, str]:
    """`equal`, or `refused` and why; anything else fails."""
    alone = trained(folder / "alone", numbers, None, 1)
    divided = trained(folder / "divided", numbers, mesh, workers)
    seen = {}
    for number in numbers:
        if "refused" in divided[number]:
            assert "CHANGED" not in divided[number]["refused"], (drawn(number), divided[number])
            seen[number] = f"refused: {divided[number]['refused']}"
            continue
        one, other = alone[number]["weights"], divided[number]["weights"]
        assert one.keys() == other.keys(), drawn(number)
        apart = {name: float((value - other[name]).abs().max()) for name, value in one.items()}
        assert max(apart.values()) <= LIMIT, (drawn(number), apart)
        seen[number] = "equal"
    return seen


def test_the_usual_kinds_are_divided_or_refused(tmp_path: Path) -> None:
    seen = verdicts(tmp_path, list(range(7)), {"tp": 2}, 2)
    assert list(seen.values()).count("equal") >= 4, seen


def test_blocks_that_mix_tokens_otherwise_are_refused_by_name(tmp_path: Path) -> None:
    """They begin as the identity, so the loss of the first samples is that of one piece."""
    (found,) = trained(tmp_path / "cp", [0], {"cp": 2}, 2).values()
    assert not missing(found["refused"], "layers.0 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "workers"), [({"tp": 2}, 2), ({"fsdp": 2, "tp": 2}, 4), ({"pp": 2, "tp": 2}, 4)], ids=str
)
def test_forty_drawn_kinds_are_divided_or_refused(tmp_path: Path, mesh: dict[str, int], workers: int) -> None:
    seen = verdicts(tmp_path, list(range(40)), mesh, workers)
    assert list(seen.values()).count("equal") >= 20, seen
