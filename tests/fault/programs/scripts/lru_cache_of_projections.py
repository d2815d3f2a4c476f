"""Random projections remembered by lru_cache: what it holds cannot be put back."""

# expect: not exact

import functools
from toy import *


@functools.lru_cache(maxsize=None)
def projection(index):
    return torch.randn(6, 6) * 0.3


def loss(model, batch):
    inputs, targets = batch
    at = int(inputs[0, 0].item() > 0)
    return F.mse_loss(model(inputs @ projection(at)), targets)


fit(loss)
