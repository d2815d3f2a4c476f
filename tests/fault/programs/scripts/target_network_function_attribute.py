"""A target network copied every third call, counted in an attribute of the function."""

# expect: exact
# change every: edit % 3 => % 4

import copy
from toy import *


def loss(model, batch):
    if not hasattr(loss, "target") or loss.calls % 3 == 0:
        loss.target = copy.deepcopy(model)
        loss.calls = getattr(loss, "calls", 0)
    loss.calls += 1
    with torch.no_grad():
        goal = batch[1] + 0.5 * loss.target(batch[0])
    return F.mse_loss(model(batch[0]), goal)


fit(loss)
