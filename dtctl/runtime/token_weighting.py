"""Losses that weigh tokens instead of samples: the mean is over all that count in the whole global batch.

A mean per micro batch, averaged over passes and workers, gives a token in a short text more weight than one in a long
text. So the loss function returns a sum and how much it is a sum of; how much that is over all passes and workers is
known only after the last forward pass, and the gradient is put right then, by one number.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtctl.runtime.distributed.worker import Worker

Weighted = tuple[torch.Tensor, torch.Tensor | float]
"""A sum over what counts in a batch, and how much that is: `(losses.sum(), (targets != ignored).sum())`."""


def correction(weights: list[torch.Tensor], samples: int, worker: Worker, *, copies: int = 1) -> torch.Tensor:
    """Return what to multiply a gradient with that was divided by the number of samples instead; collective.

    Args:
        weights: of this worker's passes; scalars on its device.
        samples: of the global batch, which the sums were divided by.
        worker: this worker.
        copies: workers that have the same samples and count the same weights.

    Returns:
        A scalar on the worker's device. Where nothing counts at all, the gradient is 0 and stays so.
    """
    total = torch.stack(weights).sum()
    if worker.backend is not None:
        dist.all_reduce(total)
    return samples * copies / torch.where(total == 0, torch.ones_like(total), total)
