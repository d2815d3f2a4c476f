"""A small framework: callbacks in a registry by event, one of which keeps an average."""

# expect: exact

from collections import defaultdict
from toy import *

registry = defaultdict(list)


def on(event):
    def add(function):
        registry[event].append(function)
        return function

    return add


class Smoother:
    def __init__(self):
        self.value = 0.0

    def __call__(self, value):
        self.value = 0.7 * self.value + 0.3 * value
        return 1 + self.value


registry["loss"].append(Smoother())


@on("loss")
def halves(value):
    halves.count = getattr(halves, "count", 0) + 1
    return 0.5 if halves.count % 2 else 1.0


def loss(model, batch):
    value = mse(model, batch)
    for callback in registry["loss"]:
        value = value * callback(value.item())
    return value


fit(loss)
