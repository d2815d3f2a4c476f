"""Statistics of modules in a WeakKeyDictionary, filled by hooks."""

# expect: exact or not exact

import weakref
from toy import *

stats = weakref.WeakKeyDictionary()


def watch(module, args, out):
    stats[module] = 0.8 * stats.get(module, 1.0) + 0.2 * out.detach().abs().mean().item()
    return out / stats[module]


def train(config, worker):
    model = mlp()
    model[0].register_forward_hook(watch)
    return finish(Trainer(config, worker, model, mse, data()))


start(train)
