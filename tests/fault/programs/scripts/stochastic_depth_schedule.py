"""Layers are left out more and more often; the rate is an attribute."""

# expect: exact

from toy import *


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head, self.rate = nn.Linear(6, 1), 0.0

    def forward(self, x):
        self.rate = min(0.5, self.rate + 0.05)
        for block in self.blocks:
            if random.random() >= self.rate:
                x = x + torch.tanh(block(x))
            else:
                x = x + 0 * block(x)
        return self.head(x)


fit(model=Deep)
