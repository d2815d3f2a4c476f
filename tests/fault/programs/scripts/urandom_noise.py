"""Seeds from the operating system."""

# expect: not exact

from toy import *


def loss(model, batch):
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
    return F.mse_loss(model(batch[0] + 0.1 * torch.randn(batch[0].shape, generator=generator)), batch[1])


fit(loss)
