"""A dict in a module of one's own that two files share."""

# expect: exact

import toy
from toy import *


def loss(model, batch):
    toy.toy_state["count"] += 1
    return mse(model, batch) * (1 + 0.1 * toy.toy_state["count"])


fit(loss)
