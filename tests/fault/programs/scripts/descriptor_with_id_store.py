"""A descriptor that keeps values by id of the owner."""

# expect: exact

from toy import *


class Tracked:
    def __init__(self):
        self.store = {}

    def __get__(self, owner, kind=None):
        return self if owner is None else self.store.get(id(owner), 1.0)

    def __set__(self, owner, value):
        self.store[id(owner)] = value


class Net(nn.Module):
    gain = Tracked()

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        self.gain = self.gain * 1.1
        return self.net(x) * self.gain


fit(model=Net)
