"""The rate falls when a global best loss has not been beaten for two steps."""

# expect: exact

from toy import *

best, patience, rate_now = float("inf"), 0, 0.05


def loss(model, batch):
    global best, patience, rate_now
    value = mse(model, batch)
    if value.item() < best:
        best, patience = value.item(), 0
    else:
        patience += 1
        if patience > 1:
            rate_now, patience = rate_now * 0.5, 0
    return value


def rate(step):
    return rate_now


fit(loss, rate=rate)
