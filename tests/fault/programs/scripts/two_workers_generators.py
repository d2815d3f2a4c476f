"""A generator per worker, seeded by rank."""

# workers: 2
# expect: exact

from toy import *


def train(config, worker):
    source = np.random.default_rng(worker.rank)

    def loss(model, batch):
        noise = torch.from_numpy(source.normal(size=tuple(batch[0].shape))).float()
        return F.mse_loss(model(batch[0] + 0.1 * noise), batch[1])

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
