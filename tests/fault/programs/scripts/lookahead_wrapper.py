"""Lookahead that wraps another optimizer, as in the popular helper."""

# expect: exact

from collections import defaultdict
from toy import *


class Lookahead(torch.optim.Optimizer):
    def __init__(self, optimizer, k=3, alpha=0.5):
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        super().__init__(optimizer.param_groups, dict(k=k))
        self.param_groups = optimizer.param_groups
        self.slow = defaultdict(dict)
        self.counts = [0 for _ in self.param_groups]

    def step(self, closure=None):
        self.optimizer.step(closure)
        for at, group in enumerate(self.param_groups):
            self.counts[at] += 1
            if self.counts[at] % self.k:
                continue
            for p in group["params"]:
                if "slow" not in self.slow[p]:
                    self.slow[p]["slow"] = p.data.clone()
                self.slow[p]["slow"] += self.alpha * (p.data - self.slow[p]["slow"])
                p.data.copy_(self.slow[p]["slow"])


def train(config, worker):
    make = lambda model: Lookahead(torch.optim.Adam(model.parameters(), lr=0.02))
    return finish(Trainer(config, worker, mlp(), mse, data(), optimizer=make))


start(train)
