"""A data set whose __getitem__ counts without effect on the sample, read by the loss."""

# expect: exact or not exact

from toy import *


class Counted(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs, self.targets = points(32)
        self.reads = 0

    def __len__(self):
        return 32

    def __getitem__(self, at):
        self.reads += 1
        return self.inputs[at], self.targets[at]


counted = Counted()


def loss(model, batch):
    return mse(model, batch) * (1 + 0.01 * counted.reads)


fit(loss, samples=lambda: counted)
