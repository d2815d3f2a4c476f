"""np.random.RandomState in a closure."""

# expect: exact

from toy import *


def train(config, worker):
    source = np.random.RandomState(4)

    def loss(model, batch):
        inputs, targets = batch
        return F.mse_loss(model(inputs + torch.from_numpy(source.normal(size=(4, 6))).float()), targets)

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
