"""Tensors put together from boxes are those that were divided."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import assembly
from dtctl.runtime.snapshot.format import headers, packing
from dtctl.runtime.snapshot.format.pieces import TensorPiece
from tests.facts import raises


def cuts(tensor: torch.Tensor, dim: int, places: list[int]) -> list[TensorPiece]:
    """A tensor divided along one dim."""
    ends = [0, *sorted(places), tensor.shape[dim]]
    found = []
    for begin, end in pairwise(ends):
        offset = [0] * tensor.dim()
        offset[dim] = begin
        part = tensor.narrow(dim, begin, end - begin).contiguous()
        found.append(TensorPiece(part, tuple(tensor.shape), tuple(offset)))
    return found


def file(part: Any) -> tuple[headers.FileHeader, memoryview]:
    """A part's file as header and data."""
    outline, tensors = packing.build_part_outline(part)
    data = bytearray(outline.size_bytes)
    for slot, tensor in zip(outline.slots, tensors, strict=True):
        data[slot.begin : slot.end] = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return headers.parse_header(memoryview(outline.header())), memoryview(data)


def together(parts: list[Any]) -> tuple[Any, dict[str, memoryview]]:
    files = {f"{number}": file(part) for number, part in enumerate(parts)}
    trees = assembly.assemble_part_trees(("part", name, header) for name, (header, _) in files.items())
    return trees["part"], {name: data for name, (_, data) in files.items()}


@given(st.data())
def test_a_tensor_cut_along_any_dim_is_whole_again(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 1))
    places = data.draw(st.lists(st.integers(0, shape[dim]), max_size=3))
    whole = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    pieces = [piece for piece in cuts(whole, dim, places) if piece.tensor.numel()]
    tree, files = together([{"w": piece} for piece in reversed(pieces)])
    (leaf,) = assembly.iter_tree_entries(tree)
    assert (leaf.name, leaf.shape) == ("w", tuple(shape))
    assert b"".join(assembly.iter_tensor_bytes(leaf, files)) == whole.numpy().tobytes()


def test_a_piece_that_lacks_is_said() -> None:
    first, _ = cuts(torch.arange(10), 0, [4])
    with raises(SnapshotError, "part.deep.w 4 10 numbers"):
        together([{"deep": {"w": first}}])


def test_what_is_no_tensor_is_added_up() -> None:
    one = {"groups": [{"lr": 0.1, "params": ["a", "b"]}], "state": {"a": {"step": 3}}}
    two = {"groups": [{"lr": 0.1, "params": ["b", "c"]}], "state": {"c": {"step": 4, "list": [None, 7]}}}
    files = [("optimizer", str(number), file(part)[0]) for number, part in enumerate((one, two))]
    assert assembly.assemble_part_trees(files)["optimizer"] == {
        "groups": [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.1, "params": ["c"]}],
        "state": {"a": {"step": 3}, "c": {"step": 4, "list": [None, 7]}},
    }


def test_boxes_have_in_common_what_both_have() -> None:
    assert assembly.intersect_boxes(((0, 2), (4, 3)), ((1, 0), (9, 4))) == ((1, 2), (3, 2))
    assert assembly.intersect_boxes(((0,), (4,)), ((4,), (2,))) is None
    assert assembly.intersect_boxes(((), ()), ((), ())) == ((), ())
