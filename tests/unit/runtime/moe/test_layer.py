"""A layer of experts computes what its definition says, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime import MoE
from dtctl.runtime.moe import accounting
from dtctl.runtime.moe.accounting import ExpertLoad
from dtctl.runtime.moe.balance import ExpertBalance, compute_expert_use, list_counted_layers
from dtctl.train.mesh import Coordinate, Degrees

WIDTH, EXPERTS = 6, 4


def layer(**options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(width=WIDTH, hidden=5, experts=EXPERTS, **options).double()


def expert(made: MoE, number: int, token: torch.Tensor) -> torch.Tensor:
    own = made.experts
    return own.down[number] @ (nn.functional.silu(own.gate[number] @ token) * (own.up[number] @ token))


def by_definition(made: MoE, stream: torch.Tensor, limit: float = float("inf")) -> torch.Tensor:
    result = torch.zeros_like(stream)
    for sample, tokens in enumerate(stream):
        taken = [0] * EXPERTS
        for place, token in enumerate(tokens):
            scores = (made.router.weight @ token).softmax(-1)
            weights, chosen = scores.topk(made.top_k)
            for weight, number in zip(weights / weights.sum(), chosen.tolist(), strict=True):
                taken[number] += 1
                if taken[number] <= limit:
                    result[sample, place] += weight * expert(made, number, token)
    return result


@pytest.mark.parametrize(("capacity", "limit"), [(None, float("inf")), (1.0, 4), (0.5, 2)])
def test_each_token_gets_the_weighted_outputs_of_its_experts(capacity: float | None, limit: float) -> None:
    made, stream = layer(capacity=capacity), torch.randn(3, 8, WIDTH, dtype=torch.float64)
    assert torch.allclose(made(stream), by_definition(made, stream, limit), rtol=1e-12, atol=1e-14)


def test_weights_are_scaled_and_shared_experts_are_not() -> None:
    plain, scaled = layer(shared=1), layer(shared=1, route_scale=2.5)
    stream = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    assert plain.shared is not None
    routed = by_definition(plain, stream)
    assert torch.allclose(scaled(stream), 2.5 * routed + plain.shared(stream), rtol=1e-12, atol=1e-14)


def test_experts_that_are_parts_of_a_dense_network_compute_what_it_does() -> None:
    made, stream = layer(top_k=EXPERTS, route_scale=EXPERTS), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    nn.init.zeros_(made.router.weight)  # all weights alike
    assert torch.allclose(made(stream), sum_of_all(made, stream), rtol=1e-12, atol=1e-14)


def sum_of_all(made: MoE, stream: torch.Tensor) -> torch.Tensor:
    own = made.experts
    gate, up, down = own.gate.flatten(0, 1), own.up.flatten(0, 1), own.down.transpose(0, 1).flatten(1, 2)
    return (nn.functional.silu(stream @ gate.T) * (stream @ up.T)) @ down.T


def test_shared_experts_are_added() -> None:
    made, stream = layer(shared=2), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    assert made.shared is not None
    assert torch.allclose(made(stream), by_definition(made, stream) + made.shared(stream), rtol=1e-12, atol=1e-14)


def gradient(made: MoE, stream: torch.Tensor) -> torch.Tensor:
    made.zero_grad()
    made(stream).square().sum().backward()
    assert made.router.weight.grad is not None
    return made.router.weight.grad.clone()


def test_the_balance_loss_is_that_of_the_samples_which_count_times_the_weight_of_the_pass() -> None:
    plain, balanced = layer(), layer(balance_loss=0.3, z_loss=0.2)
    stream = torch.randn(3, 8, WIDTH, dtype=torch.float64)
    with accounting.ForwardPass(weight=2.5, samples=2, load=None):
        added = gradient(balanced, stream) - gradient(plain, stream)
    logits = stream[:2] @ plain.router.weight.T
    shares = logits.softmax(-1)
    used = nn.functional.one_hot(shares.topk(2, dim=-1).indices, EXPERTS).double().sum((1, 2)) / 16
    balance = (EXPERTS * (used * shares.mean(1)).sum(-1)).mean()
    expected = 0.3 * balance + 0.2 * logits.logsumexp(-1).square().mean()
    (wanted,) = torch.autograd.grad(2.5 * expected, plain.router.weight)
    assert torch.allclose(added, wanted, rtol=1e-9, atol=1e-12)


def test_an_evaluation_and_a_stand_in_add_nothing() -> None:
    plain, balanced = layer(), layer(balance_loss=0.3, z_loss=0.2)
    stream = torch.randn(3, 8, WIDTH, dtype=torch.float64)
    with accounting.ForwardPass(weight=1.0, samples=0, load=None):
        assert torch.equal(gradient(balanced, stream), gradient(plain, stream))
    balanced.eval()
    assert torch.equal(gradient(balanced, stream), gradient(plain, stream))


@pytest.mark.parametrize("shape", [(3, WIDTH), (2, 2, 2, WIDTH)])
def test_what_has_no_samples_and_tokens_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="dims"):
        layer()(torch.randn(shape, dtype=torch.float64))


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(PlanError, match="5 of 4 experts"):
        layer(top_k=5)


def test_a_step_moves_the_bias_towards_experts_that_got_less_and_tells_how_even_it_was(worker: Any) -> None:
    made = layer(bias_rate=0.5, top_k=1)
    model = nn.Sequential(made)
    balance = ExpertBalance(list_counted_layers(model), model, worker, Coordinate(degrees=Degrees(), rank=0))
    balance.load.add(made, torch.tensor([6, 2, 0, 0]), torch.tensor(2))
    counts = balance.counts(taken=True, logged=True)
    balance.update_biases(counts)
    assert made.bias is not None
    assert made.bias.tolist() == [-0.5, 0.0, 0.5, 0.5]
    assert compute_expert_use(counts) == {
        "expert_load": 3.0, "expert_tokens": 2.0, "expert_tokens_max": 6.0, "experts_idle": 0.5, "tokens_dropped": 0.25
    }  # fmt: skip
    balance.load.add(made, torch.tensor([6, 2, 0, 0]), torch.tensor(2))
    assert balance.counts(taken=False, logged=False) == []
    assert made.bias.tolist() == [-0.5, 0.0, 0.5, 0.5], "a step that was left out changes nothing"
    assert not balance.load.chosen


def test_a_pass_counts_the_choices_of_the_samples_that_count_and_no_pass_that_is_made_again() -> None:
    made, stream = layer(capacity=0.5), torch.randn(3, 8, WIDTH, dtype=torch.float64)
    load = ExpertLoad({made})
    with accounting.ForwardPass(weight=1.0, samples=2, load=load):
        result = torch.utils.checkpoint.checkpoint(made, stream, use_reentrant=False)
        with torch.no_grad():
            made(stream)
    result.sum().backward()
    assert int(load.chosen[made].sum()) == 2 * 8 * 2
    dropped = [max(0, int(count) - 2) for sample in range(2) for count in choices(made, stream[sample])]
    assert int(load.dropped[made]) == sum(dropped) > 0


def choices(made: MoE, tokens: torch.Tensor) -> list[int]:
    chosen = (tokens @ made.router.weight.T).topk(2, dim=-1).indices
    return torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
