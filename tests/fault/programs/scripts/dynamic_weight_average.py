"""Weights of the tasks from the ratio of the last two losses of each, in a dict of lists."""

# expect: exact

from toy import *

history = {"fit": [], "size": []}


def weight(name):
    past = history[name]
    return math.exp(past[-1] / past[-2] / 2) if len(past) >= 2 else 1.0


def loss(model, batch):
    out = model(batch[0])
    tasks = {"fit": F.mse_loss(out, batch[1]), "size": out.abs().mean()}
    total = sum(weight(name) * value for name, value in tasks.items())
    for name, value in tasks.items():
        history[name].append(value.item())
    return total


fit(loss)
