"""Which buffers of a model may change in training, though a lost worker is replaced."""

from __future__ import annotations

import torch
from torch import nn

from dtctl.runtime import MoE
from dtctl.runtime.live.recovery import compute_buffers_checksum


def test_biases_that_balance_experts_are_of_the_step_and_others_of_what_a_worker_has_seen() -> None:
    layer = MoE(width=4, hidden=4, experts=2, bias_rate=0.1)
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(layer, MoE(width=4, hidden=4, experts=2), norm)
    before = compute_buffers_checksum(model)
    assert layer.bias is not None
    layer.bias.add_(torch.tensor([0.1, -0.1]))
    assert compute_buffers_checksum(model) == before
    norm(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)))
    assert compute_buffers_checksum(model) != before
