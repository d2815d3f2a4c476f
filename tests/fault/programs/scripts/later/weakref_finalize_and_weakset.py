"""Objects register themselves in a WeakSet, which is summed up."""

# expect: exact or not exact

import weakref
from toy import *

alive = weakref.WeakSet()


class Head(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.hits = 0
        alive.add(self)

    def forward(self, x):
        self.hits += 1
        return super().forward(x) * (1 + 0.1 * sum(h.hits for h in alive))


fit(model=lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Head(5, 1)))
