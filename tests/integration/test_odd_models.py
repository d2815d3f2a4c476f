"""What others' models, losses and optimizers do: trained as in one process, or refused with a place and a hint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.facts import missing

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("odd_worker.py")
LIMIT = 1e-9
STRATEGIES = ("ddp", "zero1", "fsdp")
KINDS = ("weight norm", "kept graph", "complex", "attribute", "method", "in place", "scalar", "own state")
REFUSED = {
    ("complex", "fsdp"): "several number formats train.strategy",
    ("scalar", "fsdp"): "zero-dimensional train.strategy",
}


def trained(folder: Path, cases: list[dict[str, Any]], workers: int) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    ended = forked.launch([WORKER, json.dumps(cases), folder], workers, cwd=folder)
    assert ended.code == 0, ended.output[-6000:]
    found: list[dict[str, Any]] = torch.load(folder / "found.pt")
    return found


def test_they_are_trained_as_in_one_process_or_refused(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", [{"kind": kind, "settings": {}} for kind in KINDS], 1)
    pairs = [(number, strategy) for number in range(len(KINDS)) for strategy in STRATEGIES]
    cases = [{"kind": KINDS[number], "settings": {"strategy": strategy}} for number, strategy in pairs]
    for (number, strategy), found in zip(pairs, trained(tmp_path / "two", cases, 2), strict=True):
        kind = KINDS[number]
        if (kind, strategy) in REFUSED:
            assert not missing(found["refused"], REFUSED[kind, strategy]), found
            continue
        assert "refused" not in found, (kind, strategy, found)
        for name, value in alone[number]["weights"].items():
            assert float((value - found["weights"][name]).abs().max()) <= LIMIT, (kind, strategy, name)


def test_an_optimizers_own_state_goes_on_from_a_snapshot(tmp_path: Path) -> None:
    (expected,) = trained(tmp_path / "alone", [{"kind": "own state", "settings": {}}], 1)
    cases = [
        {"kind": "own state", "settings": {"strategy": "fsdp", **more}, "steps": [2, 4]}
        for more in ({}, {"snapshot": {"dir": str(tmp_path / "pieces"), "layout": "sharded"}})
    ]
    for found in trained(tmp_path / "two", cases, 2):
        assert found["began_at"] == 2
        for name, value in expected["weights"].items():
            assert float((value - found["weights"][name]).abs().max()) <= LIMIT, name


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_loss_that_goes_past_the_model_is_refused(tmp_path: Path, strategy: str) -> None:
    """torch's wrapper would exchange nothing, and each worker train a model of its own."""
    (found,) = trained(tmp_path, [{"kind": "past the model", "settings": {"strategy": strategy}}], 2)
    assert not missing(found["refused"], "model(...) ddp Trainer")


def test_a_rate_that_follows_the_loss_goes_on_exactly(tmp_path: Path) -> None:
    weights = []
    for name, killed in (("straight", []), ("killed", ["13"])):
        folder = tmp_path / name
        folder.mkdir()
        for when in killed:
            ended = forked.launch([WORKER], 1, cwd=folder, environ={"PLATEAU": "1", "KILL": when})
            assert "SIGKILL" in ended.output, ended.output
        ended = forked.launch([WORKER], 1, cwd=folder, environ={"PLATEAU": "1"})
        assert ended.code == 0, ended.output
        weights.append(torch.load(folder / "weights.pt"))
    assert "resumed at step 10 of 20: nothing known differs\nexact: steps 11 to 12 repeated" in ended.output, (
        ended.output
    )
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
