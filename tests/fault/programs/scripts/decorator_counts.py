"""A decorator that counts calls in a closure."""

# expect: exact

import functools
from toy import *


def every_third(function):
    calls = 0

    @functools.wraps(function)
    def wrapped(model, batch):
        nonlocal calls
        calls += 1
        return function(model, batch) * (2.0 if calls % 3 == 0 else 1.0)

    return wrapped


@every_third
def loss(model, batch):
    return mse(model, batch)


fit(loss)
