"""The state pattern: an object is replaced by one of another class."""

# expect: exact or not exact

from toy import *


class Warm:
    gain, age = 2.0, 0

    def next(self):
        self.age += 1
        return Main() if self.age == 3 else self


class Main:
    gain = 0.5

    def next(self):
        return self


class Context:
    def __init__(self):
        self.state = Warm()


context = Context()


def loss(model, batch):
    context.state = context.state.next()
    return mse(model, batch) * context.state.gain


fit(loss)
