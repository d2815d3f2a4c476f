"""A warm-up object deletes itself from the loss function's helper."""

# expect: exact

from toy import *


class Helper:
    def __init__(self):
        self.warm = [3.0, 2.0, 1.5]


helper = Helper()


def loss(model, batch):
    gain = 1.0
    if hasattr(helper, "warm"):
        gain = helper.warm.pop(0)
        if not helper.warm:
            del helper.warm
    return mse(model, batch) * gain


fit(loss)
