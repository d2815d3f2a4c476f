"""A step counter made of itertools.count."""

# expect: exact

import itertools
from toy import *

counter = itertools.count()


def loss(model, batch):
    return mse(model, batch) * (1 + 0.1 * next(counter))


fit(loss)
