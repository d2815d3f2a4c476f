"""zero1 with a sign optimizer that counts in its groups."""

# workers: 2
# expect: exact

from toy import *


class Sign(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.01, calls=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * p.grad
                p.sub_(torch.sign(state["m"]), alpha=group["lr"] / group["calls"] ** 0.5)


fit(optimizer=lambda model: Sign(model.parameters()), settings={"strategy": "zero1"})
