"""Optimizers that look at whole matrices train divided parameters as one process does, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.facts import missing

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("whole_worker.py")
LIMIT = 1e-12
WHOLE = ("orthogonal", "torch's Muon", "muon", "adafactor")


def trained(folder: Path, cases: list[dict[str, Any]], workers: int) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    named = [{"folder": str(number), **case} for number, case in enumerate(cases)]
    ended = forked.launch([WORKER, json.dumps(named), folder], workers, cwd=folder)
    assert ended.code == 0, ended.output[-6000:]
    found: list[dict[str, Any]] = torch.load(folder / "found.pt")
    return found


def compare(folder: Path, optimizers: tuple[str, ...], strategy: Any, workers: int, **rest: Any) -> None:
    alone = trained(folder / "alone", [{"optimizer": name, "settings": {}} for name in optimizers], 1)
    settings = {"strategy": strategy, **rest}
    cases = [{"optimizer": name, "settings": settings} for name in optimizers]
    for name, one, other in zip(optimizers, alone, trained(folder / "divided", cases, workers), strict=True):
        apart = {key: float((value - other["weights"][key]).abs().max()) for key, value in one["weights"].items()}
        assert max(apart.values()) <= LIMIT, (name, apart)
        assert other["together"] is (name in WHOLE), name


def test_divided_matrices_are_trained_whole(tmp_path: Path) -> None:
    compare(tmp_path, ("orthogonal", "muon"), "fsdp", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("fsdp", 2), ({"dp": 2, "fsdp": 2}, 4), ({"fsdp": 2, "tp": 2}, 4), ({"fsdp": 2, "pp": 2}, 4), ("fsdp", 4)],
    ids=str,
)
def test_every_division_trains_matrices_whole(tmp_path: Path, strategy: Any, workers: int) -> None:
    compare(tmp_path, (*WHOLE, "adamw"), strategy, workers)


def test_an_optimizer_that_needs_all_matrices_is_refused(tmp_path: Path) -> None:
    (found,) = trained(tmp_path, [{"optimizer": "coupled", "settings": {"strategy": "fsdp"}}], 2)
    assert not missing(found["refused"], "Coupled whole matrices")


def test_a_snapshot_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    names = ("orthogonal", "adafactor", "muon")
    expected = trained(tmp_path / "alone", [{"optimizer": name, "settings": {}, "steps": 6} for name in names], 1)
    for workers, steps, strategy in ((2, 3, "fsdp"), (1, 4, "single"), (2, 6, "fsdp")):
        cases = [{"optimizer": name, "settings": {"strategy": strategy}, "steps": steps} for name in names]
        found = trained(tmp_path / "resumed", cases, workers)
    for one, other in zip(expected, found, strict=True):
        assert other["began_at"] == 4
        for key, value in one["weights"].items():
            assert float((value - other["weights"][key]).abs().max()) <= LIMIT
