"""The loss writes the difficulty of each sample into the data set, which maps indices by it."""

# expect: exact or not exact

from toy import *


class Hard(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs, self.targets = points(32)
        self.difficulty = np.ones(32)

    def __len__(self):
        return 32

    def __getitem__(self, at):
        if self.difficulty[at] < 0.2:
            at = int(self.difficulty.argmax())
        return self.inputs[at], self.targets[at], torch.tensor(at)


def train(config, worker):
    hard = Hard()

    def loss(model, batch):
        inputs, targets, numbers = batch
        errors = (model(inputs) - targets).square()[:, 0]
        hard.difficulty[numbers.numpy()] = errors.detach().numpy()
        return errors.mean()

    return finish(Trainer(config, worker, mlp(), loss, hard))


start(train)
