"""A cache of random features that throws out the one not used for longest: the order matters."""

# expect: exact

from collections import OrderedDict
from toy import *

cache = OrderedDict()


def feature(key):
    if key in cache:
        cache.move_to_end(key)
    else:
        cache[key] = torch.randn(6)
        if len(cache) > 2:
            cache.popitem(last=False)
    return cache[key]


def loss(model, batch):
    key = int(batch[0][0, 0].item() * 2) % 3
    return F.mse_loss(model(batch[0] + feature(key)), batch[1])


fit(loss)
