"""A pruning mask kept in a dict, applied by a forward pre-hook from step 3 on."""

# expect: exact or not exact

from toy import *

masks = {}


def train(config, worker):
    model = mlp()
    calls = [0]

    def apply(module, args):
        calls[0] += 1
        if calls[0] == 3:
            masks["0"] = (module.weight.abs() > module.weight.abs().median()).float()
        if "0" in masks:
            module.weight.data.mul_(masks["0"])

    model[0].register_forward_pre_hook(apply)
    return finish(Trainer(config, worker, model, mse, data()))


start(train)
