"""The published RAdam, with a table of computed steps in an attribute."""

# expect: exact

from toy import *


class RAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02):
        self.table = [[None, None] for _ in range(10)]
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 0.01)
                row = self.table[state["step"] % 10]
                if row[0] != state["step"]:
                    row[0], row[1] = state["step"], math.sqrt(1 - 0.99 ** state["step"]) / (1 - 0.9 ** state["step"])
                p.addcdiv_(state["m"], state["v"].sqrt() + 1e-8, value=-group["lr"] * row[1])


fit(optimizer=lambda model: RAdam(model.parameters()))
