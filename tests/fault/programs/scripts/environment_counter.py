"""A counter in os.environ; the guide says that variables which code reads are not covered."""

# expect: not exact

from toy import *


def loss(model, batch):
    os.environ["CALLS"] = str(int(os.environ.get("CALLS", "0")) + 1)
    return mse(model, batch) * (1 + 0.1 * int(os.environ["CALLS"]))


fit(loss)
