"""Which kinds of batches were seen, in a set."""

# expect: exact

from toy import *

seen = set()


def loss(model, batch):
    seen.add(int(batch[0].sum().item()))
    return mse(model, batch) * (1 + 0.1 * len(seen) + 0.01 * sum(sorted(seen)[:3]))


fit(loss)
