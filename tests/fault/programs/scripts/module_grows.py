"""A layer is put in after the third step, identity at first; its weights are not trained."""

# expect: exact or not exact

from toy import *


class Grow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head, self.calls = nn.ModuleList([nn.Linear(6, 6)]), nn.Linear(6, 1), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.layers.append(nn.Linear(6, 6).requires_grad_(False))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


fit(model=Grow)
