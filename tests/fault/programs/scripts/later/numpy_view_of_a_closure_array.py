"""A view of an array: the whole is written, a slice is read."""

# expect: exact

from toy import *


def train(config, worker):
    table = np.zeros((4, 6), np.float32)
    first = table[0]

    def loss(model, batch):
        table[:] = table * 0.9 + 0.1 * batch[0].numpy()
        return F.mse_loss(model(batch[0] - torch.from_numpy(first.copy())), batch[1])

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
