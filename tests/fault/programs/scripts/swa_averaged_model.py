"""torch's AveragedModel with an averaging function of its own, held by a global dict."""

# expect: exact

from torch.optim.swa_utils import AveragedModel
from toy import *

helpers = {}


def loss(model, batch):
    if "swa" not in helpers:
        helpers["swa"] = AveragedModel(model, avg_fn=lambda old, new, n: old + (new - old) / (n + 1))
    with torch.no_grad():
        goal = helpers["swa"](batch[0])
    value = mse(model, batch) + F.mse_loss(model(batch[0]), goal)
    helpers["swa"].update_parameters(model)
    return value


fit(loss)
