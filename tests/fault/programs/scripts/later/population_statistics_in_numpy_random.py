"""Random erasing with a probability that an annealing class with __slots__ and a property computes."""

# expect: exact

from toy import *


class Anneal:
    __slots__ = ("_calls", "rng")

    def __init__(self):
        self._calls, self.rng = 0, np.random.default_rng(12)

    @property
    def probability(self):
        self._calls += 1
        return min(0.5, 0.05 * self._calls)

    def erase(self, x):
        mask = self.rng.random(x.shape) < self.probability
        return x.masked_fill(torch.from_numpy(mask), 0.0)


anneal = Anneal()


def loss(model, batch):
    return F.mse_loss(model(anneal.erase(batch[0])), batch[1])


fit(loss)
