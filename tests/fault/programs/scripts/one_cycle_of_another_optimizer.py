"""OneCycleLR moves rate and momentum of a second optimizer; nothing declares it."""

# expect: exact

from toy import *


def train(config, worker):
    head = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)

    def loss(model, batch):
        optimizer.zero_grad()
        F.mse_loss(head(batch[0]), batch[1]).backward()
        optimizer.step()
        schedule.step()
        return mse(model, batch) + F.mse_loss(model(batch[0]), head(batch[0]).detach())

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
