"""fsdp, and a buffer that only rank 0 would need."""

# workers: 2
# expect: exact

from toy import *


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.net(x - self.mean)


fit(model=Net, settings={"strategy": "fsdp"})
