"""Slices of one flat tensor: the parts are read, the whole is written."""

# expect: exact

from toy import *


class Flat:
    def __init__(self):
        self.whole = torch.zeros(12)
        self.mean, self.spread = self.whole[:6], self.whole[6:]

    def update(self, x):
        self.whole.mul_(0.8).add_(torch.cat([x.mean(0), x.std(0)]), alpha=0.2)


flat = Flat()


def loss(model, batch):
    flat.update(batch[0])
    return F.mse_loss(model((batch[0] - flat.mean) / (1 + flat.spread)), batch[1])


fit(loss)
