"""The same forgetful object, which nothing declares."""

# expect: exact or not exact

from toy import *


class Balance:
    def __init__(self):
        self.mean, self.count = 1.0, 0

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


balance = Balance()


def loss(model, batch):
    value = mse(model, batch)
    balance.count += 1
    balance.mean = 0.9 * balance.mean + 0.1 * value.item()
    return value / balance.mean * (1 + 0.1 * balance.count)


fit(loss)
