"""BYOL: momentum by a cosine over an internal count, a predictor, and a target network in a wrapper with __call__."""

# expect: exact

import copy
from toy import *


class BYOL:
    def __init__(self, online):
        self.online, self.target = online, copy.deepcopy(online)
        self.step, self.base = 0, 0.8

    def momentum(self):
        return 1 - (1 - self.base) * (math.cos(math.pi * self.step / 20) + 1) / 2

    def __call__(self, model, batch):
        m = self.momentum()
        self.step += 1
        for old, new in zip(self.target.parameters(), self.online.parameters()):
            old.data = m * old.data + (1 - m) * new.data
        with torch.no_grad():
            goal = self.target(batch[0] + 0.1 * torch.randn_like(batch[0]))
        return F.mse_loss(model(batch[0]), goal) + mse(model, batch)


def train(config, worker):
    model = mlp()
    return finish(Trainer(config, worker, model, BYOL(model), data()))


start(train)
