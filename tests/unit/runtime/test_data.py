"""Data sets and files of tokens."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dtctl.errors import SpecError
from dtctl.runtime.data_loading.datasets import TensorData, TokenFile, make_batch_reader, move_to_device
from tests.facts import raises


def test_both_kinds_of_data_sets_give_the_same_batches() -> None:
    tensors = TensorData(torch.arange(12.0).view(6, 2), torch.arange(6))
    pairs = [(tensors.tensors[0][i], tensors.tensors[1][i]) for i in range(6)]
    indices = np.array([4, 0, 5])
    fast, slow = make_batch_reader(tensors)(indices), make_batch_reader(pairs)(indices)
    assert all(torch.equal(one, two) for one, two in zip(fast, slow, strict=True))


def test_tensors_must_be_of_equal_length() -> None:
    with raises(ValueError, "equal length"):
        TensorData(torch.zeros(3), torch.zeros(4))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_windows_overlap_by_one(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(100, 123).astype(dtype).tofile(path)
    data = TokenFile(path, context=5, dtype=dtype)
    assert len(data) == 4
    inputs, targets = data.batch(np.array([3, 0]))
    assert inputs.tolist() == [[115, 116, 117, 118, 119], [100, 101, 102, 103, 104]]
    assert targets.tolist() == [[116, 117, 118, 119, 120], [101, 102, 103, 104, 105]]
    assert inputs.dtype == torch.int64


def test_token_files_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    with raises(SpecError, "read"):
        TokenFile(path, context=2)
    path.write_bytes(b"123")
    with raises(SpecError, "uint16"):
        TokenFile(path, context=1)
    path.write_bytes(b"1234")
    with raises(SpecError, "3 tokens"):
        TokenFile(path, context=2)
    with raises(SpecError, "uint16 uint32"):
        TokenFile(path, context=1, dtype="int8")


def test_moving_keeps_the_shape_of_a_batch() -> None:
    batch = {"x": [torch.zeros(2), (torch.ones(1), "name")], "y": 3}
    moved = move_to_device(batch, torch.device("meta"))
    assert moved["x"][0].device.type == moved["x"][1][0].device.type == "meta"
    assert moved["x"][1][1] == "name"
    assert moved["y"] == 3
    assert move_to_device(batch, torch.device("cpu")) is batch


class Pair(NamedTuple):
    inputs: Any
    targets: Any


@dataclass(frozen=True)
class Example:
    inputs: torch.Tensor
    name: str = "a"


class Encoding(UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: a UserDict with more than its entries, and a constructor of its own."""

    def __init__(self, data: dict[str, Any], encodings: list[int]) -> None:
        super().__init__(data)
        self.encodings = encodings


def test_batches_keep_their_class_whatever_it_is() -> None:
    meta, ones = torch.device("meta"), torch.ones(2)
    pair = move_to_device(Pair(ones, [ones]), meta)
    assert isinstance(pair, Pair)
    assert pair.inputs.is_meta
    assert pair.targets[0].is_meta

    given = Encoding({"ids": ones, "length": 2}, [7])
    encoding = move_to_device(given, meta)
    assert isinstance(encoding, Encoding)
    assert encoding["ids"].is_meta
    assert (encoding["length"], encoding.encodings) == (2, [7])
    assert not given["ids"].is_meta, "the data set's own stays where it was"

    example = move_to_device(Example(ones), meta)
    assert isinstance(example, Example)
    assert example.inputs.is_meta
    assert example.name == "a"

    ordered = move_to_device(OrderedDict(b=ones, a=ones), meta)
    assert (type(ordered), list(ordered)) == (OrderedDict, ["b", "a"])
    assert all(value.is_meta for value in ordered.values())


def test_packed_sequences_know_themselves_what_goes_along() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move_to_device(packed, torch.device("meta"))
    assert moved.data.is_meta
    assert not moved.batch_sizes.is_meta
