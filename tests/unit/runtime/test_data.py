"""Data sets and files of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dtctl.errors import SpecError
from dtctl.runtime.data import TensorData, TokenFile, reader, to_device


def test_both_kinds_of_data_sets_give_the_same_batches() -> None:
    tensors = TensorData(torch.arange(12.0).view(6, 2), torch.arange(6))
    pairs = [(tensors.tensors[0][i], tensors.tensors[1][i]) for i in range(6)]
    indices = np.array([4, 0, 5])
    fast, slow = reader(tensors)(indices), reader(pairs)(indices)
    assert all(torch.equal(one, two) for one, two in zip(fast, slow, strict=True))


def test_tensors_must_be_of_equal_length() -> None:
    with pytest.raises(ValueError, match="equal length"):
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
    with pytest.raises(SpecError, match="cannot be read"):
        TokenFile(path, context=2)
    path.write_bytes(b"123")
    with pytest.raises(SpecError, match="no whole number of uint16 tokens"):
        TokenFile(path, context=1)
    path.write_bytes(b"1234")
    with pytest.raises(SpecError, match="fewer than 3 tokens"):
        TokenFile(path, context=2)
    with pytest.raises(SpecError, match="uint16 or uint32"):
        TokenFile(path, context=1, dtype="int8")


def test_moving_keeps_the_shape_of_a_batch() -> None:
    batch = {"x": [torch.zeros(2), (torch.ones(1), "name")], "y": 3}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"][0].device.type == moved["x"][1][0].device.type == "meta"
    assert moved["x"][1][1] == "name"
    assert moved["y"] == 3
    assert to_device(batch, torch.device("cpu")) is batch
