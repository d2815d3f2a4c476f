"""An EXP3 bandit chooses the augmentation."""

# expect: exact

from toy import *


class Bandit:
    def __init__(self, arms):
        self.weights, self.rng, self.last = np.ones(arms), np.random.default_rng(8), None

    def pick(self):
        p = self.weights / self.weights.sum()
        self.last = int(self.rng.choice(len(p), p=p))
        return self.last

    def reward(self, value):
        self.weights[self.last] *= math.exp(0.1 * value)


bandit = Bandit(3)


def loss(model, batch):
    factor = (0.5, 1.0, 2.0)[bandit.pick()]
    value = F.mse_loss(model(batch[0] * factor), batch[1])
    bandit.reward(value.item())
    return value


fit(loss)
