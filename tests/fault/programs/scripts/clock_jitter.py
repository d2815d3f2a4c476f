"""Noise from the clock: no two runs are the same."""

# expect: not exact

import time
from toy import *


def loss(model, batch):
    return mse(model, batch) * (1 + 1e-3 * (time.time_ns() % 1000))


fit(loss)
