"""The new spectral norm, whose power iteration advances with every pass."""

# expect: exact

from torch.nn.utils.parametrizations import spectral_norm
from toy import *


def net():
    return nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 1)))


fit(model=net)
