"""Fast weights in a dict, moved by hand and used with functional_call."""

# expect: exact

from torch.func import functional_call
from toy import *

fast = {}


def loss(model, batch):
    if not fast:
        fast.update({name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()})
    inner = F.mse_loss(functional_call(model, fast, (batch[0],)), batch[1])
    for (name, p), grad in zip(list(fast.items()), torch.autograd.grad(inner, list(fast.values()))):
        fast[name] = (p - 0.1 * grad).detach().requires_grad_()
    near = sum((p - fast[name].detach()).square().sum() for name, p in model.named_parameters())
    return mse(model, batch) + 0.1 * near


fit(loss)
