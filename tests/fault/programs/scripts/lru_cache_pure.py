"""lru_cache of a pure function."""

# expect: exact

import functools
from toy import *


@functools.lru_cache(maxsize=None)
def window(length):
    return torch.hann_window(length)


def loss(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs * window(6)), targets)


fit(loss)
