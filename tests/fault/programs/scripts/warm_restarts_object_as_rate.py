"""A callable object with its own clock as rate."""

# expect: exact

from toy import *


class WarmRestarts:
    def __init__(self):
        self.t, self.period = 0, 3

    def __call__(self, step):
        rate = 0.02 * (1 + math.cos(math.pi * self.t / self.period))
        self.t += 1
        if self.t >= self.period:
            self.t, self.period = 0, self.period * 2
        return rate


def train(config, worker):
    return finish(Trainer(config, worker, mlp(), mse, data(), rate=WarmRestarts()))


start(train)
