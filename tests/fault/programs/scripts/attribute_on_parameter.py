"""Statistics hung on the parameters themselves."""

# expect: exact

from toy import *


def loss(model, batch):
    total = mse(model, batch)
    for p in model.parameters():
        p.activity = 0.9 * getattr(p, "activity", 0.0) + p.detach().abs().mean().item()
        total = total + 0.05 * p.activity * p.square().sum()
    return total


fit(loss)
