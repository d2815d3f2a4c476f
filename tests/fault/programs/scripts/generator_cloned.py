"""A generator that is replaced by a split of itself in each step."""

# expect: exact

from toy import *


class Keys:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def split(self):
        seed = int(torch.randint(2**31, (1,), generator=self.generator))
        self.generator = torch.Generator().manual_seed(seed)
        return self.generator


keys = Keys()


def loss(model, batch):
    return F.mse_loss(model(batch[0] + 0.1 * torch.randn(batch[0].shape, generator=keys.split())), batch[1])


fit(loss)
