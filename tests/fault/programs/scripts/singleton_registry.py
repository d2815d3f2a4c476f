"""A singleton that is made on first use."""

# expect: exact

from toy import *


class Stats:
    _instance = None

    def __new__(cls):
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance.total = 0.0
        return cls._instance


def loss(model, batch):
    value = mse(model, batch)
    Stats().total += value.item()
    return value * (1 + Stats().total)


fit(loss)
