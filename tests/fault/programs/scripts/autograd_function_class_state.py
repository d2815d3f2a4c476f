"""A custom autograd Function whose backward counts on the class."""

# expect: exact

from toy import *


class Reverse(torch.autograd.Function):
    strength = 0.0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        Reverse.strength += 0.05
        return -Reverse.strength * grad


class Domain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.label, self.domain = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.label(x) + self.domain(Reverse.apply(x))


fit(model=Domain)
