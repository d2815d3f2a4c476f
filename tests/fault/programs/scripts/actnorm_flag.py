"""Activation norm of Glow: parameters are set from the first batch, and a Python flag remembers it."""

# expect: exact

from toy import *


class ActNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.initialized = False

    def forward(self, x):
        if not self.initialized:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-3))
            self.initialized = True
        return (x + self.shift) * self.scale


def net():
    return nn.Sequential(nn.Linear(6, 8), ActNorm(8), nn.Tanh(), nn.Linear(8, 1))


fit(model=net)
