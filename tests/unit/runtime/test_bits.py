"""The sum of the bits of tensors is the same however they are divided, and another after a change."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from dtctl.runtime import bits
from dtctl.runtime.bits import MODULUS, sum_tensor_part, sum_tensors

pytestmark = pytest.mark.torch

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def make(dtype: torch.dtype, shape: tuple[int, ...] = (6, 7, 8)) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return numbers > 0 if dtype is torch.bool else (8 * numbers).to(dtype)


def add_up(tensor: torch.Tensor) -> int:
    """The definition, one word at a time."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    size = tensor.element_size()
    flat = tensor.contiguous().reshape(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16}.get(size, torch.int32)).tolist()
    return sum(word * (2 * place + 1) for place, word in enumerate(words)) % MODULUS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_add_up_to_the_whole(dtype: torch.dtype) -> None:
    whole = make(dtype)
    expected = add_up(whole)
    assert sum_tensor_part(whole, whole.shape, (0, 0, 0)) == expected
    for cut in itertools.product((False, True), repeat=3):
        cuts = [
            ((0, 2), (2, 3), (3, size)) if divided else ((0, size),)
            for divided, size in zip(cut, whole.shape, strict=True)
        ]
        total = 0
        for ranges in itertools.product(*cuts):
            part = whole[tuple(slice(*ends) for ends in ranges)]
            total += sum_tensor_part(part, whole.shape, [first for first, _ in ranges])
        assert total % MODULUS == expected, cut


@pytest.mark.parametrize("word", [-(1 << 31), (1 << 31) - 1, -1])
def test_the_largest_words_are_summed_exactly(word: int) -> None:
    words = torch.full((3 * bits.BLOCK + 1030,), word, dtype=torch.int32)
    assert sum_tensor_part(words, words.shape, (0,)) == word * len(words) ** 2 % MODULUS
    words[::3] += 1
    assert sum_tensor_part(words, words.shape, (0,)) == add_up(words)


@pytest.mark.parametrize("shape", [(1, 1 << 17), (3, 40_000), (70_000,), (300, 333), (5, 0), ()])
def test_long_tensors_are_summed_in_blocks(shape: tuple[int, ...]) -> None:
    whole = make(torch.float32, shape)
    assert sum_tensor_part(whole, shape, (0,) * len(shape)) == add_up(whole)
    if len(shape) > 1 and whole.numel():
        left, right = whole.split([shape[1] // 3, shape[1] - shape[1] // 3], 1)
        total = sum_tensor_part(left, shape, (0, 0)) + sum_tensor_part(right, shape, (0, shape[1] // 3))
        assert total % MODULUS == add_up(whole)


def test_a_gpu_adds_up_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the operations that a GPU would be given, here on the CPU."""
    monkeypatch.setattr(bits, "_sum_on_cpu", bits._sum_on_device)
    monkeypatch.setattr(bits, "DEVICE_BLOCK", 100)
    for dtype in DTYPES:
        whole = make(dtype)
        assert sum_tensor_part(whole, whole.shape, (0, 0, 0)) == add_up(whole)
        parts = sum_tensor_part(whole[:, 2:], whole.shape, (0, 2, 0)) + sum_tensor_part(
            whole[:, :2], whole.shape, (0, 0, 0)
        )
        assert parts % MODULUS == add_up(whole)


def test_sparse_gradients_have_bits() -> None:
    dense = torch.zeros(9, 4)
    dense[[2, 5]] = make(torch.float32, (2, 4))
    moved = dense.roll(1, 0)
    assert sum_tensors({"a": dense.to_sparse()}) == sum_tensors({"a": dense.clone().to_sparse()})
    assert sum_tensors({"a": dense.to_sparse()}) != sum_tensors({"a": moved.to_sparse()})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_changes_show(dtype: torch.dtype) -> None:
    source, tensor = random.Random(3), make(dtype, (64, 32))
    before = sum_tensors({"weight": tensor})
    changed = {
        "signs": -tensor,
        "two signs": tensor.clone(),
        "rows": tensor.flip(0),
        "columns": tensor.roll(1, 1),
        "transposed": tensor.reshape(32, 64).t().contiguous(),
        "one bit": tensor.clone(),
    }
    changed["two signs"].view(-1)[3:5].neg_()
    one = changed["one bit"].view(-1)
    index = source.randrange(one.numel())
    one[index : index + 1].view(torch.uint8)[0] ^= 1
    for what, other in changed.items():
        assert sum_tensors({"weight": other}) != before, what
    assert sum_tensors({"bias": tensor}) != before, "another name"
    first, second = make(dtype, (4,)), make(dtype, (4,)) * 2
    assert sum_tensors({"a": first, "b": second}) != sum_tensors({"a": second, "b": first})
    assert sum_tensors({"a": first, "b": second}) == sum_tensors({"b": second, "a": first})
