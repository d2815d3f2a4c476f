"""Lazy layers, made real by a first pass before training."""

# expect: exact or not exact

from toy import *


def net():
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
    model(torch.zeros(1, 6))
    return model


fit(model=net)
