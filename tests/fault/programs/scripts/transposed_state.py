"""A tensor that is kept transposed: adding up in another order gives other bits."""

# expect: exact

from toy import *

kept = {"matrix": torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).t()}


def loss(model, batch):
    kept["matrix"] = kept["matrix"] * 1.01
    mixed = batch[0] @ kept["matrix"].t() @ kept["matrix"] / 64
    return F.mse_loss(model(mixed), batch[1])


fit(loss)
