"""Annealed noise on gradients: tensor hooks share a counter in a list."""

# expect: exact

from toy import *


def train(config, worker):
    model = mlp()
    calls = [0]

    def noisy(grad):
        calls[0] += 1
        return grad + torch.randn_like(grad) * 0.1 / (1 + calls[0]) ** 0.55

    for p in model.parameters():
        p.register_hook(noisy)
    return finish(Trainer(config, worker, model, mse, data()))


start(train)
