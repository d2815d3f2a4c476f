"""Deterministic kernels: what is set, when, and what a resume calls itself with and without them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime import determinism
from dtctl.runtime.distributed.worker import Worker
from dtctl.train.config import TrainConfig, load
from tests.facts import raises
from tests.unit.runtime.conftest import Make, squared
from tests.unit.runtime.test_exactness import HALF, WHOLE
from tests.verdicts import read_verdict


@pytest.fixture(autouse=True)
def switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's own, as they were, after a test."""
    for name in determinism.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    cudnn = torch.backends.cudnn
    kept = (cudnn.deterministic, cudnn.benchmark)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    cudnn.deterministic, cudnn.benchmark = kept
    for name in determinism.VARIABLES:
        os.environ.pop(name, None)


@pytest.mark.parametrize(
    ("settings", "cpu", "cuda"),
    [
        ({}, False, False),
        ({"require_exact": True}, False, True),
        ({"exact": "elastic"}, False, True),
        ({"require_exact": True, "deterministic": False}, False, False),
        ({"deterministic": True}, True, True),
    ],
)
def test_auto_is_for_gpus_that_have_promised_the_same_bits(settings: dict[str, Any], cpu: bool, cuda: bool) -> None:
    config = load(settings, argv=[], environ={})
    assert (determinism.is_wanted(config, "cpu"), determinism.is_wanted(config, "cuda")) == (cpu, cuda)


def test_an_operation_without_such_a_kernel_is_refused_by_name(make: Make) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
        return squared(model, batch)

    with raises(PlanError, "put_") as caught:
        make({"deterministic": True}, loss=loss).run()
    assert caught.value.where == "train.deterministic"


def test_the_snapshot_keeps_what_was_set(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make({"steps": HALF}).run()
    make({"steps": WHOLE, "deterministic": True, "schedule": "constant"}).run()
    text = read_verdict(capsys.readouterr().out)
    assert "deterministic algorithms changed from False to True" in text
    assert "CUBLAS_WORKSPACE_CONFIG changed from unset to :4096:8" in text


def on_gpu(worker: Worker, **changes: Any) -> Worker:
    return dataclasses.replace(worker, device=torch.device("cuda", 0), **changes)


def test_the_key_has_three_values() -> None:
    assert TrainConfig().deterministic == "auto"
