"""A module with get_extra_state and set_extra_state."""

# expect: exact

from toy import *


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self._hidden = {"calls": 0}

    def get_extra_state(self):
        return self._hidden

    def set_extra_state(self, state):
        self._hidden = state

    def forward(self, x):
        self._hidden["calls"] += 1
        return self.net(x) * (1 + 0.1 * self._hidden["calls"])


fit(model=Counting)
