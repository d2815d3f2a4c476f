"""A structure of C with fields."""

# expect: exact or not exact

import ctypes
from toy import *


class Level(ctypes.Structure):
    _fields_ = [("value", ctypes.c_double), ("count", ctypes.c_int)]


level = Level(1.0, 0)


def loss(model, batch):
    level.value *= 1.1
    level.count += 1
    return mse(model, batch) * level.value * (1 + 0.01 * level.count)


fit(loss)
