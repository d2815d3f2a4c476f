"""A codebook that exists only after the third pass: an attribute that is None and becomes a tensor."""

# expect: exact

from toy import *


class Quantize(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes, self.seen = None, []
        self.inner, self.outer = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x):
        z = self.inner(x)
        if self.codes is None:
            self.seen.append(z.detach())
            if len(self.seen) == 3:
                everything = torch.cat(self.seen)
                self.codes = everything[torch.randperm(len(everything))[:4]]
                self.seen = []
        else:
            near = self.codes[torch.cdist(z.detach(), self.codes).argmin(1)]
            self.codes = 0.9 * self.codes + 0.1 * near.mean(0)
            z = z + 0.5 * (near - z).detach()
        return self.outer(z)


fit(model=Quantize)
