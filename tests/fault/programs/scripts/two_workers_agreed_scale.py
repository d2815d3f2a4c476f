"""A scale that the workers agree on by an all-reduce in the loss."""

# workers: 2
# expect: exact

import torch.distributed as dist
from toy import *

scale = torch.ones(1)


def loss(model, batch):
    value = mse(model, batch)
    seen = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(seen)
    scale.mul_(0.9).add_(seen, alpha=0.1)
    return value / scale.item()


fit(loss)
