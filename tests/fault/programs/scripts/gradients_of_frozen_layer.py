"""Gradients of a probe outside the optimizer add up, and are read."""

# expect: exact

from toy import *


def train(config, worker):
    probe = nn.Linear(1, 1)

    def loss(model, batch):
        out = model(batch[0])
        probe(out.detach()).square().mean().backward()
        return F.mse_loss(out, batch[1]) + 0.05 * probe.weight.grad.item() * out.mean()

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
