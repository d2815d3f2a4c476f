"""A learning rate that learns: a tensor in a closure, and the gradient before."""

# expect: exact

from toy import *


class Hyper(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.02))
        self.before, self.alpha = {}, torch.tensor(0.02, dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for at, p in enumerate(group["params"]):
                if at in self.before:
                    self.alpha += 1e-4 * (p.grad * self.before[at]).sum().double()
                self.before[at] = p.grad.clone()
                p.sub_(p.grad * self.alpha.float())


fit(optimizer=lambda model: Hyper(model.parameters()))
