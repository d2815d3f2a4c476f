"""A counter in threading.local."""

# expect: exact

import threading
from toy import *

local = threading.local()


def loss(model, batch):
    local.count = getattr(local, "count", 0) + 1
    return mse(model, batch) * (1 + 0.2 * (local.count % 4))


fit(loss)
