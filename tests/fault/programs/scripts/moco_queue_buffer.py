"""MoCo: a key encoder and a queue in buffers, one per worker."""

# workers: 2
# expect: exact

import copy
from toy import *


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 5)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(32, 5), dim=1))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for old, new in zip(self.key.parameters(), self.query.parameters()):
                old.mul_(0.9).add_(new, alpha=0.1)
            k = F.normalize(self.key(x + 0.1 * torch.randn_like(x)), dim=1)
            at = int(self.pointer)
            queue = self.queue.clone()
            self.queue[at : at + len(k)] = k
            self.pointer[0] = (at + len(k)) % len(queue)
        return torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.2


def loss(model, batch):
    logits = model(batch[0])
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


fit(loss, MoCo)
