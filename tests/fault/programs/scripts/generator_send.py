"""A coroutine that is sent losses and answers with a weight."""

# expect: not exact

from toy import *


def balancer():
    mean = 1.0
    while True:
        value = yield 1 / mean
        mean = 0.8 * mean + 0.2 * value


scale = balancer()
next(scale)


def loss(model, batch):
    value = mse(model, batch)
    return value * scale.send(value.item())


fit(loss)
