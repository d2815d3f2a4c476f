"""Activations: a lambda in a module, and a functional with a keyword."""

# expect: exact
# change body: edit torch.tanh(x) => torch.sin(x)
# change slope: edit negative_slope=0.1 => negative_slope=0.2

from toy import *


class Act(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def net():
    first = Act(lambda x: torch.tanh(x))
    second = Act(lambda x: F.leaky_relu(x, negative_slope=0.1))
    return nn.Sequential(nn.Linear(6, 8), first, nn.Linear(8, 8), second, nn.Linear(8, 1))


fit(model=net)
