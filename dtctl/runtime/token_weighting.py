"""Losses that weight tokens instead of samples: the mean is over all counted tokens of the global batch.

A mean per micro batch, averaged over passes and workers, gives a token in a short text more weight than one in a long
text. Therefore the loss function returns a sum and its weight. The total weight over all passes and workers is known
only
after the last forward pass; the gradient is then corrected by one factor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtctl.runtime.distributed.worker import Worker

Weighted = tuple[torch.Tensor, torch.Tensor | float]
"""Sum over the counted elements of a batch, and their number: `(losses.sum(), (targets != ignored).sum())`."""


def compute_gradient_correction(
    weights: list[torch.Tensor], samples: int, worker: Worker, *, copies: int = 1
) -> torch.Tensor:
    """Return the factor that corrects a gradient which was divided by the number of samples; collective.

    Args:
        weights: weights of this worker's passes; scalars on its device.
        samples: samples of the global batch, by which the sums were divided.
        worker: this worker.
        copies: number of workers that have the same samples and count the same weights.

    Returns:
        A scalar on the worker's device. If no element counts, the gradient is 0 and stays so.
    """
    total = torch.stack(weights).sum()
    if worker.backend is not None:
        dist.all_reduce(total)
    return samples * copies / torch.where(total == 0, torch.ones_like(total), total)
