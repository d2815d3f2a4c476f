"""A torch.Generator as attribute of a module."""

# expect: exact

from toy import *


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.generator = mlp(), torch.Generator().manual_seed(11)

    def forward(self, x):
        picked = torch.multinomial(torch.ones(6), 3, generator=self.generator)
        mask = torch.zeros(6)
        mask[picked] = 2.0
        return self.net(x * mask)


fit(model=Noisy)
