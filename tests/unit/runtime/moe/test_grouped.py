"""All experts' products written where they belong, beside the loop that autograd would differentiate."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from dtctl.runtime.moe.grouped import compute_feed_forward

WIDTH, HIDDEN = 16, 24


def loop(
    rows: torch.Tensor, counts: Sequence[int], gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    linear, parts = nn.functional.linear, torch.split_with_sizes(rows, list(counts))
    results = [
        linear(nn.functional.silu(linear(part, g)) * linear(part, u), d)
        for part, g, u, d in zip(parts, gate, up, down, strict=True)
    ]
    return torch.cat(results)


def operands(counts: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [
        (sum(counts), WIDTH), (len(counts), HIDDEN, WIDTH), (len(counts), HIDDEN, WIDTH), (len(counts), WIDTH, HIDDEN)
    ]  # fmt: skip
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("counts", [(3, 5, 1), (0, 7, 0, 2), (4,)], ids=str)
def test_the_bits_are_those_of_a_loop_over_experts(counts: tuple[int, ...], autocast: bool) -> None:
    results = []
    for compute in (compute_feed_forward, loop):
        rows, gate, up, down = values = operands(counts)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = compute(rows, counts, gate, up, down)
        output.float().square().sum().backward()
        results.append([output, *(value.grad for value in values)])
    for own, expected in zip(*results, strict=True):
        assert own is not None
        assert own.dtype == expected.dtype
        assert torch.equal(own, expected)
    assert results[0][0].dtype == (torch.bfloat16 if autocast else torch.float32)


def test_autocast_leaves_double_precision_alone() -> None:
    rows, *weights = operands((2, 3), torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_feed_forward(rows, (2, 3), *weights).dtype == torch.float64


def test_gradients_are_those_of_finite_differences() -> None:
    values = [value.detach()[..., :6, :6].contiguous().requires_grad_() for value in operands((2, 0, 3), torch.float64)]
    values[0] = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *args: compute_feed_forward(args[0], (2, 0, 3), *args[1:]), values)


def test_weights_that_are_not_trained_get_no_gradient() -> None:
    rows, gate, up, down = operands((2, 3))
    gate.requires_grad_(False)
    compute_feed_forward(rows, (2, 3), gate, up, down).sum().backward()
    assert gate.grad is None
    assert up.grad is not None
    assert rows.grad is not None


def test_no_more_is_kept_than_two_tensors_of_the_inner_width() -> None:
    counts, sizes = (8, 8), dict[int, int]()
    values = operands(counts)

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = compute_feed_forward(values[0], counts, *values[1:])
    for value in values:
        del sizes[value.untyped_storage().data_ptr()]
    assert sum(sizes.values()) == 2 * len(output) * HIDDEN * output.element_size()
