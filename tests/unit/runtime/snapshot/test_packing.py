"""Files that others can read, with every bit of every kind of tensor."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from dtctl.runtime.snapshot import load
from dtctl.runtime.snapshot.format import headers, layout, packing
from dtctl.runtime.snapshot.storage.staging import StagingBuffer


def there_and_back(part: Any) -> Any:
    (file,) = StagingBuffer().stage_tensors({"part": part}).files
    text = file.outline.header() + file.data.numpy().tobytes()
    return unpacked(text)


def unpacked(text: bytes) -> Any:
    entry = layout.SnapshotFile(size_bytes=len(text), digest="")
    manifest = layout.Manifest(step=1, hash="blake3", facts={}, files={"part.safetensors": entry})
    return load.build_parts_from_contents({"part.safetensors": memoryview(bytearray(text))}, manifest)["part"]


@pytest.mark.parametrize("dtype", packing.DTYPES.values(), ids=str)
def test_every_type_of_number_keeps_its_bits(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(2, 3)
    back = there_and_back({"odd": torch.ones(3, dtype=torch.uint8), "x": tensor.T, "scalar": tensor[0, 0]})
    assert (back["x"].dtype, back["x"].shape, back["scalar"].shape) == (dtype, (3, 2), ())
    assert torch.equal(
        back["x"].contiguous().view(-1).view(torch.uint8), tensor.T.contiguous().view(-1).view(torch.uint8)
    )
    assert torch.equal(back["scalar"].view(1).view(torch.uint8), raw[: dtype.itemsize])


def test_plain_values_keep_theirs() -> None:
    part = {
        "floats": [0.1, math.inf, 1e-320],
        "none": None,
        "true": True,
        "text": "\u00e9\n",
        "empty": {},
        "int": 2**80,
        "none of it": torch.empty(0, 3),
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "": torch.ones(2),
        "__metadata__": torch.ones(3),
    }
    back = there_and_back(part)
    assert back.keys() == part.keys()
    tensors = {name for name, value in back.items() if isinstance(value, torch.Tensor)} | {"a"}
    assert {name: back[name] for name in back.keys() - tensors} == {name: part[name] for name in part.keys() - tensors}
    assert (back["none of it"].shape, back["a.b"].tolist(), back["a"]["b"].tolist()) == ((0, 3), [1], [0])
    assert there_and_back((1, (2,))) == [1, [2]]
    assert math.isnan(there_and_back({"x": math.nan})["x"])


def test_the_file_is_as_safetensors_says() -> None:
    """By its README: length, JSON, data without gaps; and aligned."""
    (file,) = (
        StagingBuffer()
        .stage_tensors({"model": {"b": torch.ones(3, dtype=torch.int8), "a.weight": torch.ones(2, 2)}})
        .files
    )
    header = file.outline.header()
    length = int.from_bytes(header[:8], "little")
    assert len(header) == 8 + length
    assert len(header) % headers.ALIGNMENT == 0
    document = json.loads(header[8:])
    assert set(document) == {"__metadata__", "a.weight", "b"}
    assert document["a.weight"] == {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    assert document["b"] == {"dtype": "I8", "shape": [3], "data_offsets": [16, 19]}
    assert all(isinstance(value, str) for value in document["__metadata__"].values())
    assert file.data.numel() == 19


def test_the_buffer_is_used_again_whatever_the_state_becomes() -> None:
    staging = StagingBuffer()
    first = staging.stage_tensors({"model": {"w": torch.zeros(1000)}}).files[0].data.data_ptr()
    for state in (
        {"w": torch.ones(1000)},
        {"w": torch.ones(500), "v": torch.zeros(7, dtype=torch.int8)},
        {"w": torch.ones(1000)},
    ):
        staged = staging.stage_tensors({"model": state})
        assert staged.files[0].data.data_ptr() == first
        text = staged.files[0].outline.header() + staged.files[0].data.numpy().tobytes()
        back = unpacked(text)
        assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
