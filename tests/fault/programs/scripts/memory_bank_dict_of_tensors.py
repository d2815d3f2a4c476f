"""Temporal ensembling: a dict from sample to its averaged prediction."""

# expect: exact

from collections import defaultdict
from toy import *

ensemble = defaultdict(lambda: torch.zeros(1))


def loss(model, batch):
    inputs, targets, numbers = batch
    out = model(inputs)
    goal = []
    for n, o in zip(numbers.tolist(), out.detach()):
        ensemble[n] = 0.6 * ensemble[n] + 0.4 * o
        goal.append(ensemble[n])
    return F.mse_loss(out, targets) + F.mse_loss(out, torch.stack(goal))


def numbered():
    inputs, targets = points(32)
    return TensorData(inputs, targets, torch.arange(32))


fit(loss, samples=numbered)
