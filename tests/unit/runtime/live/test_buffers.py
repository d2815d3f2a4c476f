"""Which buffers of a model may change in training, though a lost worker is replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from torch import nn

from dtctl.runtime import MoE
from dtctl.runtime.live.recovery import buffers_checksum
from dtctl.runtime.live.training import Training


def test_biases_that_balance_experts_are_of_the_step_and_others_of_what_a_worker_has_seen() -> None:
    layer = MoE(width=4, hidden=4, experts=2, bias_rate=0.1)
    norm = nn.BatchNorm1d(3)
    trainer = cast(Training, SimpleNamespace(model=nn.Sequential(layer, MoE(width=4, hidden=4, experts=2), norm)))
    before = buffers_checksum(trainer)
    assert layer.bias is not None
    layer.bias.add_(torch.tensor([0.1, -0.1]))
    assert buffers_checksum(trainer) == before
    norm(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)))
    assert buffers_checksum(trainer) != before
