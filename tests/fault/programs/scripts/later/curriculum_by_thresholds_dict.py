"""Stages of a curriculum that are popped from a list of tuples when the loss is low enough."""

# expect: exact

from toy import *

stages = [(0.9, 0.5), (0.6, 0.8), (0.3, 1.0), (0.0, 1.2)]
past = []


def loss(model, batch):
    value = mse(model, batch)
    past.append(float(value))
    if len(past) >= 2 and len(stages) > 1 and sum(past[-2:]) / 2 < 1.5:
        stages.pop(0)
        past.clear()
    return value * stages[0][1]


fit(loss)
