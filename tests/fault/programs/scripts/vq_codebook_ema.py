"""A codebook moved by averages (VQ-VAE), with dead codes drawn anew."""

# expect: exact

from toy import *


class Codebook(nn.Module):
    def __init__(self, codes=8, width=4):
        super().__init__()
        self.register_buffer("embed", torch.randn(codes, width))
        self.register_buffer("size", torch.zeros(codes))
        self.register_buffer("total", self.embed.clone())

    def forward(self, x):
        picked = torch.cdist(x, self.embed).argmin(1)
        hot = F.one_hot(picked, len(self.embed)).float()
        if self.training:
            with torch.no_grad():
                self.size.mul_(0.8).add_(hot.sum(0), alpha=0.2)
                self.total.mul_(0.8).add_(hot.T @ x, alpha=0.2)
                self.embed.copy_(self.total / (self.size[:, None] + 1e-2))
                dead = self.size < 0.05
                self.embed[dead] = x[torch.randint(len(x), (int(dead.sum()),))]
        return x + (self.embed[picked] - x).detach()


def net():
    return nn.Sequential(nn.Linear(6, 4), Codebook(), nn.Linear(4, 1))


fit(model=net)
