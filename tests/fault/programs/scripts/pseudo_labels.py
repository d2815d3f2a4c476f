"""Targets of the data set are moved towards predictions."""

# expect: exact or not exact

from toy import *


def train(config, worker):
    inputs, targets = points(32)
    samples = TensorData(inputs, targets)
    count = 0

    def loss(model, batch):
        nonlocal count
        count += 1
        if count % 2 == 0:
            with torch.no_grad():
                targets.mul_(0.8).add_(model(inputs), alpha=0.2)
        return mse(model, batch)

    return finish(Trainer(config, worker, mlp(), loss, samples))


start(train)
