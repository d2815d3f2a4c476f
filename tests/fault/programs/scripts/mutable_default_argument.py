"""The classic: state in a default argument."""

# expect: exact

from toy import *


def loss(model, batch, seen=[]):
    seen.append(batch[1].mean().item())
    return mse(model, batch) + 0.1 * model(torch.full((1, 6), sum(seen) / len(seen))).square().sum()


fit(loss)
