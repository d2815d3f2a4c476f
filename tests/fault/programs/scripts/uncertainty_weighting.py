"""Kendall's log variances as parameters of a wrapping module."""

# expect: exact

from toy import *


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.logs = mlp(), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.net(x)


def loss(model, batch):
    out = model(batch[0])
    logs = model.logs
    return F.mse_loss(out, batch[1]) * torch.exp(-logs[0]) + out.abs().mean() * torch.exp(-logs[1]) + logs.sum()


fit(loss, Both)
