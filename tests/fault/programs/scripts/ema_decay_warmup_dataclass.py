"""Decay that warms up with a count in a dataclass with slots."""

# expect: exact

from dataclasses import dataclass
from toy import *


@dataclass(slots=True)
class Average:
    value: float = 0.0
    count: int = 0

    def add(self, value):
        self.count += 1
        decay = min(0.99, (1 + self.count) / (10 + self.count))
        self.value = decay * self.value + (1 - decay) * value
        return self.value


average = Average()


def loss(model, batch):
    value = mse(model, batch)
    return value / (0.5 + average.add(value.item()))


fit(loss)
