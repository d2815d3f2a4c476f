"""Sharpness-aware: weights are perturbed before the pass, put back by a hook of the optimizer."""

# expect: exact

from toy import *

perturbation = {}


def loss(model, batch):
    value = mse(model, batch)
    grads = torch.autograd.grad(value, list(model.parameters()))
    norm = torch.sqrt(sum(g.square().sum() for g in grads))
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads):
            perturbation[p] = 0.05 * g / norm
            p.add_(perturbation[p])
    return mse(model, batch)


def make(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def back(optimizer, args, kwargs):
        with torch.no_grad():
            for p, e in perturbation.items():
                p.sub_(e)

    optimizer.register_step_pre_hook(back)
    return optimizer


fit(loss, optimizer=make)
