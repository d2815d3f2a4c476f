"""The number of steps is kept by the class of the optimizer."""

# expect: exact

from toy import *


class Annealed(torch.optim.SGD):
    steps_done = 0

    def step(self, closure=None):
        Annealed.steps_done += 1
        for group in self.param_groups:
            group["momentum"] = 1 - 1 / (1 + Annealed.steps_done)
        return super().step(closure)


fit(optimizer=lambda model: Annealed(model.parameters(), lr=0.02, momentum=0.5))
