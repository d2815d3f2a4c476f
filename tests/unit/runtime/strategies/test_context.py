"""The parts of a sequence, and what attention makes of them; what several workers do with it is in test_equality.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from dtctl.errors import PlanError
from dtctl.runtime.strategies import blocks, context
from tests.facts import raises


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of one worker."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
    context._current.clear()


class Block(nn.Module):
    """Attention over the stream, with a mask or causal, and something for each token."""

    def forward(
        self, stream: torch.Tensor, each: torch.Tensor | None = None, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        stream = stream if each is None else stream + each
        return nn.functional.scaled_dot_product_attention(stream, stream, stream, mask, is_causal=mask is None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, stream: torch.Tensor, *args: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            stream = block(stream, *args, mask=mask)
        return stream


def of(rank: int, workers: int, tokens: int) -> context.ContextParallel:
    made = context.ContextParallel.__new__(context.ContextParallel)
    made.rank, made.workers, made.whole, made._orders = rank, workers, tokens, {}
    return made


def test_every_token_has_one_worker_and_causal_attention_is_the_same_work_for_all() -> None:
    parts = [of(rank, 3, 12).get_own_positions(torch.device("cpu")).tolist() for rank in range(3)]
    assert parts == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert len({sum(part) for part in parts}) == 1
    together = torch.tensor(parts).flatten()
    assert together[of(0, 3, 12).get_inverse_order(torch.device("cpu"))].tolist() == list(range(12))


@pytest.mark.parametrize("masked", [False, True])
def test_a_model_with_one_worker_computes_what_it_did(alone: dist.ProcessGroup, masked: bool) -> None:
    model, stream, each = Model(), torch.randn(2, 8, 4, requires_grad=True), torch.randn(8, 4)
    mask = torch.rand(8, 8) > 0.5
    mask |= torch.eye(8, dtype=torch.bool)
    given = {"mask": mask} if masked else {}
    expected = model(stream, each, **given)
    (slope,) = torch.autograd.grad(expected.square().sum(), stream)
    context.divide_block_tokens(blocks.find_repeated_blocks(model), alone)
    found = model(stream, each, **given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), stream)[0], slope)


def test_attention_outside_of_the_blocks_is_as_ever(alone: dist.ProcessGroup) -> None:
    model, stream = Model(), torch.randn(2, 8, 4)
    context.divide_block_tokens(blocks.find_repeated_blocks(model), alone)
    model(stream)
    odd = torch.randn(2, 5, 4)
    torch.testing.assert_close(
        nn.functional.scaled_dot_product_attention(odd, odd, odd), context.ATTENTION(odd, odd, odd)
    )


def test_a_model_that_is_trained_afterwards_is_left_alone(alone: dist.ProcessGroup) -> None:
    """Its blocks are computed again in the backward pass, which is where attention asks for the newest model."""
    model, other, stream = Model(), Block(), torch.randn(2, 5, 4, requires_grad=True)
    context.divide_block_tokens(blocks.find_repeated_blocks(model), alone)
    model(torch.randn(2, 8, 4))
    context.restore_torch_attention()
    checkpoint(other, stream, use_reentrant=False).sum().backward()
    assert stream.grad is not None


def test_what_cannot_be_divided_is_refused(alone: dist.ProcessGroup) -> None:
    model = Model()
    with raises(PlanError, "list blocks"):
        context.divide_block_tokens(None, alone)
    with_norm = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    with raises(PlanError, "BatchNorm"):
        context.divide_block_tokens(blocks.find_repeated_blocks(with_norm), alone)
    context.divide_block_tokens(blocks.find_repeated_blocks(model), alone)
    with raises(PlanError, "7 2 tokens"):
        model(torch.randn(2, 7, 4))
    with raises(PlanError, "mask 3 8"):
        model(torch.randn(2, 8, 4), mask=torch.ones(3, 3, dtype=torch.bool))


@pytest.mark.parametrize(("rows", "end"), [(6, 24), (6, 6)])
@pytest.mark.parametrize("shared", [False, True])
def test_what_gpus_compute_without_a_mask_is_what_a_mask_gives(rows: int, end: int, shared: bool) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, rows, 8, requires_grad=True)
    key, value = (torch.randn(2, 2 if shared else 4, end, 8, requires_grad=True) for _ in range(2))
    results = []
    for compute in (context.lower_right, lambda *a, **o: context._compute_unmasked_attention(*a, 0.0, **o)):
        result = compute(query, key, value, enable_gqa=shared)
        results.append([result, *torch.autograd.grad(result.square().sum(), (query, key, value))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_without_a_mask_attention_does_not_ask_the_context_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        inside = True

        def attention(self, *_: object, **__: object) -> torch.Tensor:
            pytest.fail("it would gather keys that are whole already")

    monkeypatch.setattr(context, "_current", [Asked()])
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", context._dispatch_attention)
    parts = [torch.randn(1, 2, size, 8) for size in (4, 16, 16)]
    assert context._compute_unmasked_attention(*parts, 0.0).shape == (1, 2, 4, 8)
    assert len(context._current) == 1
