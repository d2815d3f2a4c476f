"""torch.set_default_dtype in mid-training."""

# expect: exact or not exact

from toy import *

calls = 0


def loss(model, batch):
    global calls
    calls += 1
    if calls == 3:
        torch.set_default_dtype(torch.float64)
    noise = torch.randn(batch[0].shape).float()
    return F.mse_loss(model(batch[0] + 0.1 * noise), batch[1])


fit(loss)
