"""The current loss function is held in a global and replaced on the way."""

# expect: exact or not exact

from toy import *


def absolute(out, target):
    return (out - target).abs().mean()


current = F.mse_loss
calls = 0


def loss(model, batch):
    global current, calls
    calls += 1
    if calls == 3:
        current = absolute
    return current(model(batch[0]), batch[1])


fit(loss)
