"""An object that leaves its memory out when it is pickled."""

# expect: exact or not exact

from toy import *


class Memory:
    def __init__(self):
        self.level = 1.0

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self.level = 1.0


memory = Memory()


def loss(model, batch):
    memory.level *= 1.1
    return mse(model, batch) * memory.level


fit(loss)
