"""RunningMeanStd as gym wrappers have it: float64 arrays in a plain object."""

# expect: exact

from toy import *


class RunningMeanStd:
    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x):
        mean, var, count = x.mean(0), x.var(0), len(x)
        delta, total = mean - self.mean, self.count + count
        self.mean = self.mean + delta * count / total
        self.var = (self.var * self.count + var * count + delta**2 * self.count * count / total) / total
        self.count = total


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.stats = mlp(), RunningMeanStd(6)

    def forward(self, x):
        self.stats.update(x.detach().numpy())
        x = (x - torch.from_numpy(self.stats.mean).float()) / torch.from_numpy(np.sqrt(self.stats.var)).float()
        return self.net(x)


fit(model=Net)
