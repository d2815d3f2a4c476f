"""torch.manual_seed by an own counter within fork_rng."""

# expect: exact

from toy import *

step = 0


def loss(model, batch):
    global step
    step += 1
    with torch.random.fork_rng():
        torch.manual_seed(step)
        noise = torch.randn_like(batch[0])
    return F.mse_loss(model(batch[0] + noise), batch[1])


fit(loss)
