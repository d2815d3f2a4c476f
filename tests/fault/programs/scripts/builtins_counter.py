"""A counter put into builtins."""

# expect: not exact

import builtins
from toy import *

builtins.toy_calls = 0


def loss(model, batch):
    builtins.toy_calls += 1
    return mse(model, batch) * (1 + 0.1 * toy_calls)


fit(loss)
