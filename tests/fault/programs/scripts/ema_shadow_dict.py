"""The usual EMA helper with a shadow dict; the loss pulls the weights towards it."""

# expect: exact

from toy import *


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * p.data


def train(config, worker):
    model = mlp()
    ema = EMA(model, 0.8)

    def loss(model, batch):
        ema.update(model)
        pull = sum((p - ema.shadow[name]).square().sum() for name, p in model.named_parameters())
        return mse(model, batch) + 0.1 * pull

    return finish(Trainer(config, worker, model, loss, data()))


start(train)
