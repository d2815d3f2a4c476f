"""Norms and cutting, over plain tensors."""

from __future__ import annotations

import torch
from torch import nn

from dtctl.runtime.strategies import gradients


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(2, 2))
    made[2].requires_grad_(False)
    made[1](made[0](torch.randn(5, 3))).sum().backward()
    return made


def test_norm_and_cut_are_those_of_torch() -> None:
    one = model()
    wanted = gradients.list_trained_parameters(one)
    assert len(wanted) == 4
    whole = torch.cat([parameter.grad.reshape(-1) for parameter in wanted if parameter.grad is not None])
    total = gradients.compute_gradient_norm(wanted)
    torch.testing.assert_close(total, whole.norm())
    gradients.clip_gradients(wanted, float(total) * 2, total)
    torch.testing.assert_close(gradients.compute_gradient_norm(wanted), total)
    gradients.clip_gradients(wanted, float(total) / 2, total)
    torch.testing.assert_close(gradients.compute_gradient_norm(wanted), total / 2)


def test_no_gradients_have_no_length() -> None:
    assert float(gradients.compute_gradient_norm([torch.zeros(3)])) == 0
    gradients.clip_gradients([torch.zeros(3)], 1.0, torch.zeros(()))
