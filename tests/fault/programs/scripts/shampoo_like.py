"""Preconditioners in lists of matrices in the optimizer's state, refreshed every second step."""

# expect: exact
# change decay: edit lr=0.05, every=2 => lr=0.05, every=3

from toy import *


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, every=2):
        super().__init__(params, dict(lr=lr, every=every))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                grad = p.grad.reshape(p.shape[0], -1)
                if not state:
                    state["step"] = 0
                    state["sums"] = [torch.eye(n) * 1e-3 for n in grad.shape]
                    state["roots"] = [torch.eye(n) for n in grad.shape]
                state["sums"][0] += grad @ grad.T
                state["sums"][1] += grad.T @ grad
                if state["step"] % group["every"] == 0:
                    for at, matrix in enumerate(state["sums"]):
                        values, vectors = torch.linalg.eigh(matrix)
                        state["roots"][at] = vectors @ torch.diag(values.clamp_min(1e-6) ** -0.25) @ vectors.T
                state["step"] += 1
                p.sub_((state["roots"][0] @ grad @ state["roots"][1]).reshape(p.shape), alpha=group["lr"])


fit(optimizer=lambda model: Shampoo(model.parameters()))
