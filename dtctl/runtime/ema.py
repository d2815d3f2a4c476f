"""Moving average of the weights, which often gives better evaluations than the weights themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot.format.pieces import shard_tensor_like
from dtctl.train.config import EmaConfig


class Ema:
    """Average of a model's parameters over the steps; buffers are those of the model.

    At the beginning the decay is lower, (1 + n) / (10 + n) after n updates, so that the first weights soon lose
    influence. Source: tf.train.ExponentialMovingAverage, num_updates.
    """

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._weights = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
        self._average = [weight.clone() for weight in self._weights]
        self._decay, self._every = config.decay, config.every

    def update(self, step: int) -> None:
        """Include the weights after a step, if the step counts."""
        if step % self._every:
            return
        updates = step // self._every
        decay = min(self._decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(_list_local_tensors(self._average), _list_local_tensors(self._weights), 1 - decay)

    @contextmanager
    def using_averages(self) -> Iterator[None]:
        """Return a context in which the model has the averages as weights."""
        own, average = _list_local_tensors(self._weights), _list_local_tensors(self._average)
        kept = [weight.clone() for weight in own]
        torch._foreach_copy_(own, average)
        try:
            yield
        finally:
            torch._foreach_copy_(own, kept)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the averages by parameter name; they are not copied."""
        return dict(zip(self._names, self._average, strict=True))

    def load(self, state: Mapping[str, torch.Tensor] | None, *, absent_keys: Collection[str] = ()) -> None:
        """Restore what `state` returned. None, for a snapshot without averages: start from the present weights.

        Args:
            state: averages of the whole model.
            absent_keys: names that belong to other workers.

        Raises:
            SnapshotError: the averages belong to other parameters.
        """
        if state is None:
            torch._foreach_copy_(_list_local_tensors(self._average), _list_local_tensors(self._weights))
            return
        if set(state) - set(absent_keys) != set(self._names):
            raise SnapshotError(
                "the averaged weights of the snapshot are of other parameters",
                hint="resume with the model that the run began with, or without `train.ema`",
            )
        for name, average in zip(self._names, self._average, strict=True):
            average.copy_(shard_tensor_like(average, state[name]))


def _list_local_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return this worker's part of each sharded tensor."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
