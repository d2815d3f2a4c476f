"""A forward hook that is registered in the third step."""

# expect: exact or not exact

from toy import *

calls = 0


def double(module, args, out):
    return out * 1.5


def loss(model, batch):
    global calls
    calls += 1
    if calls == 3:
        model[0].register_forward_hook(double)
    return mse(model, batch)


fit(loss)
