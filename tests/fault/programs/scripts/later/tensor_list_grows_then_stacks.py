"""A list of tensors that becomes one stacked tensor halfway."""

# expect: exact or not exact

from toy import *

past = []


def loss(model, batch):
    global past
    if isinstance(past, list):
        past.append(batch[0].mean(0))
        center = torch.stack(past).mean(0)
        if len(past) == 3:
            past = torch.stack(past)
    else:
        past = torch.cat([past[1:], batch[0].mean(0, keepdim=True)])
        center = past.mean(0)
    return F.mse_loss(model(batch[0] - center), batch[1])


fit(loss)
