"""Averages in a list, moved in place by the foreach functions."""

# expect: exact

from toy import *

averages = []


def loss(model, batch):
    weights = [p for p in model.parameters()]
    if not averages:
        averages.extend(torch.zeros_like(p) for p in weights)
    with torch.no_grad():
        torch._foreach_lerp_(averages, weights, 0.2)
    return mse(model, batch) + 0.05 * sum((a * p).sum() for a, p in zip(averages, weights))


fit(loss)
