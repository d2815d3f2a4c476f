"""fp16: several workers skip the steps that one process skips, and train what it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.facts import missing

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("fp16_worker.py")
LIMIT = 3e-3


def trained(folder: Path, cases: list[dict[str, Any]], workers: int) -> tuple[list[dict[str, Any]], str]:
    folder.mkdir()
    ended = forked.launch([WORKER, json.dumps(cases), folder], workers, cwd=folder)
    assert ended.code == 0, ended.output[-6000:]
    found: list[dict[str, Any]] = torch.load(folder / "found.pt")
    return found, ended.output


def compare(folder: Path, workers: int, strategies: list[Any], **kind: Any) -> None:
    (alone,), said = trained(folder / "alone", [{"settings": {}, **kind}], 1)
    assert 1 in alone["skipped"], "nothing overflows, so nothing is compared"
    assert len(alone["skipped"]) < 20, "nothing is trained, so nothing is compared"
    assert not missing(said, "step 1 skipped fp16 65536 32768")
    cases = [{"settings": {"strategy": strategy} | rest, **kind} for strategy, rest in strategies]
    found, _ = trained(folder / "divided", cases, workers)
    for (strategy, _), case in zip(strategies, found, strict=True):
        assert "refused" not in case, case
        assert case["skipped"] == alone["skipped"], strategy
        assert case["scale"] == alone["scale"], strategy
        for name, value in alone["weights"].items():
            assert float((value - case["weights"][name]).abs().max()) <= LIMIT * float(value.abs().max()), (
                strategy,
                name,
            )


def test_two_workers_skip_what_one_process_skips(tmp_path: Path) -> None:
    compare(tmp_path, 2, [("ddp", {}), ("fsdp", {})])


@pytest.mark.slow
@pytest.mark.parametrize("mean", [False, True])
def test_every_strategy_skips_what_one_process_skips(tmp_path: Path, mean: bool) -> None:
    (tmp_path / "two").mkdir()
    elastic = [("ddp", {"exact": "elastic"})] if mean else []  # which goes with no loss that counts tokens
    two: list[Any] = [(name, {}) for name in ("ddp", "zero1", "fsdp", "tp", "pipeline")]
    compare(tmp_path / "two", 2, [*two, *elastic], mean=mean)
    (tmp_path / "four").mkdir()
    compare(tmp_path / "four", 4, [({"dp": 2, "fsdp": 2}, {}), ("ddp", {}), ({"fsdp": 2, "tp": 2}, {})], mean=mean)


@pytest.mark.slow
def test_experts_skip_what_one_process_skips(tmp_path: Path) -> None:
    compare(tmp_path, 2, [("ddp", {}), ({"ep": 2}, {})], mixture=True)


def test_sequences_over_workers_are_refused(tmp_path: Path) -> None:
    (found,), _ = trained(tmp_path / "cp", [{"settings": {"strategy": {"cp": 2}}}], 2)
    assert not missing(found["refused"], "fp16 cp")
