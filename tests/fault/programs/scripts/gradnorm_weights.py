"""GradNorm: weights of the tasks are parameters outside the model with an optimizer of their own."""

# expect: exact

from toy import *


def train(config, worker):
    weights = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)
    first = None

    def loss(model, batch):
        nonlocal first
        out = model(batch[0])
        tasks = torch.stack([F.mse_loss(out, batch[1]), out.abs().mean()])
        if first is None:
            first = tasks.detach()
        ratio = (tasks.detach() / first) / (tasks.detach() / first).mean()
        optimizer.zero_grad()
        (weights * tasks.detach() - ratio).abs().sum().backward()
        optimizer.step()
        return (weights.detach() * tasks).sum()

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
