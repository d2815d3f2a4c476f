"""Strength of augmentation by how often a sample was seen; every look at the data counts."""

# expect: not exact

from toy import *


class Counted(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs, self.targets = points(16)
        self.seen = [0] * 16

    def __len__(self):
        return 16

    def __getitem__(self, at):
        self.seen[at] += 1
        return self.inputs[at] * (1 + 0.2 * self.seen[at]), self.targets[at]


fit(samples=Counted)
