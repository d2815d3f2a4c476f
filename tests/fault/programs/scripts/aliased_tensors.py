"""One tensor under two names: what one writes, the other reads."""

# expect: exact

from toy import *

center = torch.zeros(6)
views = {"read": center, "slots": [center]}


def loss(model, batch):
    views["slots"][0].mul_(0.9).add_(batch[0].mean(0), alpha=0.3)
    return F.mse_loss(model(batch[0] - views["read"] - center), batch[1])


fit(loss)
