"""Each worker keeps a running mean of what it has seen."""

# workers: 2
# expect: exact
# change rate: arg --train.lr=0.05

from toy import *


def train(config, worker):
    mean = torch.zeros(6)

    def loss(model, batch):
        mean.mul_(0.9).add_(batch[0].mean(0), alpha=0.1)
        return F.mse_loss(model(batch[0] - mean), batch[1]) * (1 + 0.1 * worker.rank)

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
