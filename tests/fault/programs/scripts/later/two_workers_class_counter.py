"""Two workers, of which each counts on a class by its rank."""

# workers: 2
# expect: exact

import torch.distributed as dist
from toy import *


class Seen:
    counts = {}


def loss(model, batch):
    rank = dist.get_rank() if dist.is_initialized() else 0
    Seen.counts[rank] = Seen.counts.get(rank, 0) + 1 + rank
    return mse(model, batch) * (1 + 0.1 * Seen.counts[rank])


fit(loss)
