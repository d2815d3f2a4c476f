"""A model that caches encodings by length: pure."""

# expect: exact

from toy import *


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.cache = mlp(), {}

    def forward(self, x):
        if len(x) not in self.cache:
            self.cache[len(x)] = torch.linspace(0, 1, 6)
        return self.net(x + self.cache[len(x)])


fit(model=Cached)
