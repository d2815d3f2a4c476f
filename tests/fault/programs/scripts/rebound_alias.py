"""A list that two owners share, and that gets new tensors in it."""

# expect: exact

from toy import *


class Owner:
    def __init__(self, items):
        self.items = items


shared = [torch.zeros(1)]
writer, reader = Owner(shared), Owner(shared)


def loss(model, batch):
    writer.items.append(batch[1].mean(0))
    del writer.items[:-3]
    return mse(model, batch) + 0.3 * (model(batch[0]).mean() - sum(reader.items)).square().sum()


fit(loss)
