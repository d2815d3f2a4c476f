"""A class for everything: the loss is a method, the state lies in self."""

# expect: exact

from toy import *


class Experiment:
    def __init__(self):
        self.ema, self.step = None, 0

    def loss(self, model, batch):
        self.step += 1
        value = mse(model, batch)
        self.ema = value.item() if self.ema is None else 0.9 * self.ema + 0.1 * value.item()
        return value * (1 + self.step % 2) / self.ema

    def train(self, config, worker):
        return finish(Trainer(config, worker, mlp(), self.loss, data()))


start(Experiment().train)
