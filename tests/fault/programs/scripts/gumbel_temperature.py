"""Gumbel-softmax with a temperature that falls."""

# expect: exact

from toy import *


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.out, self.tau = nn.Linear(6, 4), nn.Linear(4, 1), 2.0

    def forward(self, x):
        self.tau = max(0.3, self.tau * 0.9)
        return self.out(F.gumbel_softmax(self.gate(x), tau=self.tau))


fit(model=Gate)
