"""Number formats, and the scale of an fp16 loss."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from dtctl.runtime.precision import LossScale, make_autocast, multiply_tensors
from dtctl.runtime.snapshot import read
from tests.unit.runtime.conftest import Make, squared


@pytest.mark.parametrize(("name", "kind"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_forward_pass_computes_in_the_format(name: str, kind: torch.dtype) -> None:
    with make_autocast(name, torch.device("cpu")) or nullcontext():
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype == kind


def test_the_scale_falls_at_once_and_rises_slowly() -> None:
    scale = LossScale(8.0, growth_interval=3)
    assert scale.update(finite=False)
    assert scale.scale == 4.0
    for _ in range(2):
        scale.update(finite=True)
    scale.update(finite=False)
    assert scale.scale == 2.0
    for _ in range(3):
        scale.update(finite=True)
    assert (scale.scale, scale.good_steps) == (4.0, 0)


def test_a_gradient_that_is_not_finite_unscaled_is_not_the_scales_fault() -> None:
    scale = LossScale(2.0)
    assert scale.update(finite=False)
    assert not scale.update(finite=False)
    assert scale.scale == 1.0


def test_a_state_is_put_back() -> None:
    scale, other = LossScale(4.0, growth_interval=2), LossScale(growth_interval=2)
    scale.update(finite=True)
    other.load(scale.state())
    other.update(finite=True)
    assert other.scale == 8.0


def test_multiplying_nothing_is_fine() -> None:
    multiply_tensors([], 2.0)
    values = [torch.ones(2), torch.ones(1)]
    multiply_tensors(values, 0.5)
    assert [value.tolist() for value in values] == [[0.5, 0.5], [0.5]]


def loud(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return squared(model, (batch[0] * 30, batch[1]))


def test_overflow_skips_steps_until_the_scale_fits(make: Make, tmp_path: Path) -> None:
    """Inputs of 30 make the gradient overflow fp16 at the first scale, and not at a later one."""
    model = nn.Linear(8, 1)
    start = model.weight.detach().clone()
    trainer = make({"precision": "fp16", "steps": 1, "snapshot": {"every_steps": 1}}, model=model, loss=loud)
    trainer.run()
    assert trainer.training.trained.loss_scale is not None
    assert trainer.training.trained.loss_scale.scale == 32768
    assert torch.equal(model.weight, start)
    good, _ = read.find_newest_good(tmp_path / "snapshots")
    assert good is not None
    assert good.manifest is not None
    assert good.manifest.facts["loss_scale"] == trainer.training.trained.loss_scale.state()
    again = make({"precision": "fp16", "steps": 40}, model=model, loss=loud)
    again.run()
    rows = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss_scale"] == again.training.trained.loss_scale.scale  # type: ignore[union-attr]
    assert again.training.trained.loss_scale is not None
    assert again.training.trained.loss_scale.scale < 32768
    assert not torch.equal(model.weight, start)
    assert model.weight.isfinite().all()


def test_a_factor_goes_to_where_the_gradients_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU torch takes a factor from anywhere; with a GPU it refuses one from the other device."""
    seen = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda some, factor: seen.append((some[0].device, factor.device)))
    multiply_tensors([torch.ones(2), torch.ones(2, device="meta"), torch.ones(3)], torch.tensor(2.0, device="cpu"))
    assert seen == [(torch.device("cpu"),) * 2, (torch.device("meta"),) * 2]
