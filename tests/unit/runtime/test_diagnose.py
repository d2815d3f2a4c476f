"""Diagnosis of a loop of one's own, on one worker; over several see the integration tests."""

from __future__ import annotations

import torch
from torch import nn

from dtctl.runtime import diagnose


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.frozen = (
            nn.Linear(2, 2),
            nn.Linear(2, 2),
            nn.Linear(2, 2).requires_grad_(False),
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(self.used(values))
        return out


def test_parameters_without_a_part_in_the_loss_are_named() -> None:
    model = Partial()
    model(torch.ones(1, 2)).sum().backward()
    assert [line.split()[0] for line in diagnose.find_parameters_without_grad(model)] == ["idle.weight", "idle.bias"]


def test_what_lies_elsewhere_is_named() -> None:
    model = Partial()
    assert diagnose.find_misplaced_tensors(model, {"x": [torch.zeros(1)]}) == []
    model.idle.to("meta")
    found = diagnose.find_misplaced_tensors(model, {"x": [torch.zeros(1), torch.zeros(1, device="meta")]})
    assert found == [
        "idle.weight is on meta, and most of the model on cpu",
        "idle.bias is on meta, and most of the model on cpu",
        "['x'][1] of the batch is on meta, and the model on cpu",
    ]
    assert diagnose.find_misplaced_tensors(nn.ReLU()) == []


def test_alone_there_is_nothing_to_compare_and_nothing_to_exchange() -> None:
    model = Partial()
    assert diagnose.find_differing_gradients(model) + diagnose.find_differing_parameters(model) == []
    calls = 0

    def passes() -> None:
        nonlocal calls
        calls += 1

    cost = diagnose.measure_gradient_exchange(passes, model, pairs=3)
    assert calls == 8
    assert 0 <= cost.share < 1


def test_shares_are_of_the_time_with_exchange() -> None:
    assert diagnose.Communication(with_s=0.010, without_s=0.008).share == 1 - 0.8
    cost = diagnose.Communication(with_s=0.008, without_s=0.010)
    assert cost.share == 0
    assert cost.describe().startswith("communication is 0% of a step's passes: 8.00 ms with")
