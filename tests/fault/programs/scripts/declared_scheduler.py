"""A declared scheduler and a declared critic."""

# expect: exact
# change gamma: edit 0.8 => 0.6

from toy import *


def train(config, worker):
    critic = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def loss(model, batch):
        optimizer.zero_grad()
        F.mse_loss(critic(batch[0]), batch[1]).backward()
        optimizer.step()
        scheduler.step()
        return F.mse_loss(model(batch[0]), batch[1] - critic(batch[0]).detach())

    extra = {"critic": critic, "optimizer": optimizer, "scheduler": scheduler}
    return finish(Trainer(config, worker, mlp(), loss, data(), extra_state=extra))


start(train)
