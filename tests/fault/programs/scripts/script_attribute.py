"""An attribute of a scripted module that changes in forward."""

# expect: not exact

from toy import *


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.linear(x) * (1.0 + 0.1 * float(self.calls))


fit(model=lambda: torch.jit.script(Scaled()))
