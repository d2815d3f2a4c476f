"""Accumulation, with a weight by pass."""

# expect: exact
# change passes: arg --train.accumulate=4

from toy import *

count = 0


def loss(model, batch):
    global count
    count += 1
    return mse(model, batch) * (1 + count % 3)


fit(loss, settings={"accumulate": 2})
