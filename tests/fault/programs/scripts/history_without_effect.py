"""A history of lists that nothing reads."""

# expect: exact

from toy import *

history = {"loss": [], "norm": []}


def loss(model, batch):
    value = mse(model, batch)
    history["loss"].append(value.item())
    history["norm"].append([p.norm().item() for p in model.parameters()])
    return value


fit(loss)
