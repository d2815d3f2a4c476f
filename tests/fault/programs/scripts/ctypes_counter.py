"""A counter of C."""

# expect: exact or not exact

import ctypes
from toy import *

count = ctypes.c_int(0)


def loss(model, batch):
    count.value += 1
    return mse(model, batch) * (1 + 0.1 * count.value)


fit(loss)
