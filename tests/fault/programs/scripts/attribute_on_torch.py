"""A counter hung on the torch module; the guide says that globals of installed packages are not covered."""

# expect: not exact

from toy import *

torch.toy_calls = 0


def loss(model, batch):
    torch.toy_calls += 1
    return mse(model, batch) * (1 + 0.1 * torch.toy_calls)


fit(loss)
