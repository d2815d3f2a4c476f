"""A map-style data set that augments with all the usual generators."""

# expect: exact

from toy import *


class Augmented(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs, self.targets = points()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, at):
        x = self.inputs[at] + 0.1 * torch.randn(6)
        if random.random() < 0.5:
            x = -x
        return x * float(np.random.uniform(0.9, 1.1)), self.targets[at]


fit(samples=Augmented)
