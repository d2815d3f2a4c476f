"""A custom optimizer whose lr is a callable with memory in each group."""

# expect: exact or not exact

from toy import *


class Rate:
    def __init__(self, base):
        self.base, self.n = base, 0

    def __call__(self):
        self.n += 1
        return self.base / self.n**0.5


class Called(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.05, rate=Rate(0.05)))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["rate"]()
            for p in group["params"]:
                p.sub_(p.grad, alpha=rate)


fit(optimizer=lambda model: Called(model.parameters()))
