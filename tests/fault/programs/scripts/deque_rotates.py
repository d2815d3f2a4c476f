"""A deque that is rotated."""

# expect: exact

from collections import deque
from toy import *

weights = deque([0.5, 1.0, 1.5, 2.0])


def loss(model, batch):
    weights.rotate(1)
    return mse(model, batch) * weights[0]


fit(loss)
