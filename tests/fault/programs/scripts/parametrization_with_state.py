"""A parametrization that averages the weight in an attribute."""

# expect: exact

from torch.nn.utils import parametrize
from toy import *


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.past = None

    def forward(self, weight):
        past = weight.detach() if self.past is None else 0.7 * self.past + 0.3 * weight.detach()
        if self.training and torch.is_grad_enabled():
            self.past = past
        return 0.5 * weight + 0.5 * past


def net():
    model = mlp()
    parametrize.register_parametrization(model[0], "weight", Smooth())
    return model


fit(model=net)
