"""A partial that is replaced by one with other arguments."""

# expect: exact or not exact

import functools
from toy import *


def scaled(value, factor):
    return value * factor


scale = functools.partial(scaled, factor=1.0)


def loss(model, batch):
    global scale
    scale = functools.partial(scaled, factor=scale.keywords["factor"] * 1.1)
    return scale(mse(model, batch))


fit(loss)
