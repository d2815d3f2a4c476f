"""Data sets of many kinds: whole batches, samples one by one, shards, caches, and what draws random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dtctl.runtime import TensorData
from tests.fault.zoo.models.parts import WIDTH


def regression(options: Mapping[str, Any]) -> TensorData:
    made = torch.Generator().manual_seed(options["data_seed"])
    inputs = torch.randn(options["samples"], WIDTH, generator=made)
    return TensorData(inputs, inputs[:, :1].sin() - inputs[:, 1:2])


def tokens(options: Mapping[str, Any], length: int = 8) -> TensorData:
    made = torch.Generator().manual_seed(options["data_seed"])
    text = torch.randint(0, 12, (options["samples"], length + 1), generator=made)
    return TensorData(text[:, :-1].clone(), text[:, 1:].clone())


class Random(TensorData):
    """Batches with noise of all three generators."""

    def batch(self, indices: Any) -> Any:
        inputs, targets = super().batch(indices)
        noise = torch.randn(inputs.shape) + torch.from_numpy(np.random.randn(*inputs.shape)).float()
        return inputs + 0.1 * noise + 0.01 * random.random(), targets


class Map:
    """Sample by sample, with augmentation."""

    def __init__(self, data: TensorData) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        inputs, target = (tensor[index] for tensor in self._data.tensors)
        return inputs * (1 + 0.1 * random.random()) + 0.05 * torch.randn(WIDTH) * float(np.random.rand()), target


class Cached(Map):
    """Keeps what it has read, which changes nothing."""

    def __init__(self, data: TensorData) -> None:
        super().__init__(data)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = tuple(tensor[index] for tensor in self._data.tensors)
        return self.cache[index]


class Drawing(Map):
    """Augments with a generator of its own."""

    def __init__(self, data: TensorData) -> None:
        super().__init__(data)
        self.generator = torch.Generator().manual_seed(1)

    def __getitem__(self, index: int) -> Any:
        inputs, target = (tensor[index] for tensor in self._data.tensors)
        return inputs + 0.1 * torch.randn(WIDTH, generator=self.generator), target


class Shards:
    """Read one after the other."""

    shards = 2

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.data_seed, self.samples = options["data_seed"], options["samples"]

    def open(self, shard: int, epoch: int) -> Iterator[Any]:
        made = torch.Generator().manual_seed(self.data_seed * 1000 + shard * 100 + epoch)
        for _ in range(self.samples):
            inputs = torch.randn(WIDTH, generator=made)
            yield inputs, inputs[:1].sin()
