"""The epoch in a multiprocessing.Value, so that readers would see it."""

# expect: exact or not exact

import multiprocessing
from toy import *

epoch = multiprocessing.Value("i", 0)


def loss(model, batch):
    with epoch.get_lock():
        epoch.value += 1
    return mse(model, batch) * (1 + 0.1 * epoch.value)


fit(loss)
