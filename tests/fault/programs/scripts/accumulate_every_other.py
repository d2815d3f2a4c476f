"""An optimizer that steps only every second time, and keeps gradients meanwhile."""

# expect: exact

from toy import *


class Patient(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 2 == 0:
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None

    def zero_grad(self, set_to_none=True):
        pass


fit(optimizer=lambda model: Patient(model.parameters(), lr=0.02))
