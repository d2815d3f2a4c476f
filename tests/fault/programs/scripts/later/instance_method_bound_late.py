"""A strategy method is chosen late and kept bound to its object."""

# expect: exact or not exact

from toy import *


class Weights:
    def __init__(self):
        self.current, self.n = self.warm, 0

    def warm(self):
        self.n += 1
        if self.n == 3:
            self.current = self.main
        return 2.0

    def main(self):
        self.n += 1
        return 1.0 / self.n


weights = Weights()


def loss(model, batch):
    return mse(model, batch) * weights.current()


fit(loss)
