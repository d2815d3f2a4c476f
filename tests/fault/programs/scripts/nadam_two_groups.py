"""NAdam with products in its state, and two groups."""

# expect: exact
# change decay: edit "weight_decay": 0.1 => "weight_decay": 0.3

from toy import *


def make(model):
    biases = [p for name, p in model.named_parameters() if "bias" in name]
    weights = [p for name, p in model.named_parameters() if "bias" not in name]
    return torch.optim.NAdam([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}], lr=0.02)


fit(optimizer=make)
