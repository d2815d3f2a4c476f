"""Snapshots of the model (fast ensembles) as a list of deep copies outside of it."""

# expect: exact

import copy
from toy import *

ensemble = []


def loss(model, batch):
    ensemble.append(copy.deepcopy(model))
    del ensemble[:-2]
    with torch.no_grad():
        goal = sum(member(batch[0]) for member in ensemble) / len(ensemble)
    return mse(model, batch) + F.mse_loss(model(batch[0]), goal * 0.9)


fit(loss)
