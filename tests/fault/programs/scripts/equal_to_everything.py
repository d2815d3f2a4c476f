"""An object that says it equals all others, and has a strange truth value."""

# expect: exact

from toy import *


class Odd:
    def __init__(self):
        self.level = 1.0

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1

    def __bool__(self):
        raise RuntimeError("no truth value")


odd = Odd()


def loss(model, batch):
    odd.level *= 1.1
    return mse(model, batch) * odd.level


fit(loss)
