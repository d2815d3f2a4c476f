"""Which modules are taken for experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dtctl.runtime import MoE
from dtctl.runtime.moe import recognize
from tests.integration import mixtures


def test_experts_of_dtctl_transformers_and_torchtitan_are_found() -> None:
    model = nn.ModuleList([mixtures.Indexed(), mixtures.Grouped(), MoE(width=4, hidden=4, experts=4)])
    found = recognize.find_expert_modules(model)
    assert list(found) == ["0.experts", "1.experts", "2.experts"]
    assert [recognize.find_expert_form(module) for module in found.values()] == [3, 2, 2]


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As `use_experts_implementation` in Transformers does it."""

    @functools.wraps(forward)
    def chosen(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return chosen


class Decorated(mixtures.IndexedExperts):
    forward = decorated(mixtures.IndexedExperts.forward)


def test_a_forward_pass_that_is_wrapped_keeps_its_form() -> None:
    assert recognize.find_expert_form(Decorated()) == 3


class Router(nn.Module):
    """Has the number of experts and a first dim of that size, and is called with tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.empty(4, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens @ self.weight.T


class BiasedRouter(Router):
    """As torchtitan's: called with a bias, too."""

    def forward(self, tokens: torch.Tensor, expert_bias: torch.Tensor | None = None) -> torch.Tensor:
        scores = super().forward(tokens)
        return scores if expert_bias is None else scores + expert_bias


class Uneven(mixtures.GroupedExperts):
    """Has a parameter that is not divided by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))


def test_routers_and_modules_with_other_parameters_are_not() -> None:
    assert not recognize.find_expert_modules(
        nn.ModuleList([Router(), BiasedRouter(), Uneven(), nn.Linear(4, 4), nn.Embedding(4, 4)])
    )
