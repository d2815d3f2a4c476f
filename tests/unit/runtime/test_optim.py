"""The optimizer of the configuration, and the learning rate of each step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from dtctl.runtime.optim import build_optimizer, build_rate_schedule
from dtctl.train.config import TrainConfig


def rates(steps: int, **settings: object) -> list[float]:
    rate = build_rate_schedule(TrainConfig(**settings), steps)  # type: ignore[arg-type]
    return [rate(step) for step in range(steps)]


def test_warm_up_ends_at_the_peak_and_cosine_at_the_floor() -> None:
    found = rates(100, lr=1.0, min_lr=0.1, warmup_steps=10)
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert found[10] == pytest.approx(1.0)
    assert found[-1] == pytest.approx(0.1)
    assert all(earlier > later for earlier, later in pairwise(found[10:]))


def test_linear_and_constant() -> None:
    assert rates(5, lr=1.0, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(3, lr=2.0, schedule="constant") == [2.0, 2.0, 2.0]


def test_wsd_stays_and_falls_at_the_end() -> None:
    found = rates(100, lr=1.0, min_lr=0.1, warmup_steps=10, schedule="wsd", decay_steps=20)
    assert found[9:80] == [1.0] * 71
    assert found[80] < 1.0
    assert found[84] == pytest.approx(0.1 + 0.9 * (1 - 0.5))
    assert found[-1] == pytest.approx(0.1)
    assert all(earlier > later for earlier, later in pairwise(found[79:]))
    assert rates(50, lr=1.0, schedule="wsd")[44] == 1.0 > rates(50, lr=1.0, schedule="wsd")[45]
    assert rates(2, lr=1.0, schedule="wsd", decay_steps=9)[-1] == 0.0


@pytest.mark.parametrize("kernel", ["fused", "foreach", "loop"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_kernels_and_numbers_are_those_asked_for(name: str, kernel: str) -> None:
    settings = {"optimizer": name, "kernel": kernel, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "momentum": 0.7}
    (group,) = build_optimizer(TrainConfig(**settings), nn.Linear(2, 2)).param_groups  # type: ignore[arg-type]
    assert (group["fused"], group["foreach"]) == (kernel == "fused", kernel == "foreach")
    if name == "sgd":
        assert group["momentum"] == 0.7
    else:
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)


def test_muon_has_matrices_and_adamw_the_rest() -> None:
    """Each is trained as torch's own two train it, with one learning rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 3))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = TrainConfig(optimizer="muon", lr=0.1, momentum=0.8, beta1=0.7, beta2=0.9, weight_decay=0.2)
    found = build_optimizer(config, model)
    matrices, others = (
        {name: nn.Parameter(before[name].clone()) for name in names}
        for names in (("1.weight", "2.weight"), ("0.weight", "1.bias", "2.bias"))
    )
    expected = [
        torch.optim.Muon(matrices.values(), 0.1, 0.2, 0.8, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others.values(), 0.1, (0.7, 0.9), config.eps, 0.0, fused=True),
    ]
    for step in range(3):
        for name, value in model.named_parameters():
            value.grad = torch.full_like(value, 0.5 + step)
            (matrices | others)[name].grad = value.grad.clone()
        found.step()
        for one in expected:
            one.step()
    for name, value in model.named_parameters():
        assert torch.equal(value, (matrices | others)[name]), name
        assert not torch.equal(value, before[name])
    assert len(found.state) == 5


def test_short_trainings_have_a_rate() -> None:
    assert rates(1, lr=1.0) == [1.0]
    assert rates(2, lr=1.0, warmup_steps=5) == pytest.approx([0.2, 0.4])


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_only_matrices_decay_and_frozen_parameters_stay_out(name: str, kind: type) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[2].weight.requires_grad_(False)
    found = build_optimizer(TrainConfig(optimizer=name, weight_decay=0.1), model)  # type: ignore[arg-type]
    assert isinstance(found, kind)
    decayed, kept = found.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert [p.dim() for p in decayed["params"]] == [2]
    assert [p.dim() for p in kept["params"]] == [1, 1, 1, 1]
