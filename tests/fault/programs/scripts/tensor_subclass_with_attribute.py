"""A tensor subclass that carries a count."""

# expect: exact or not exact

from toy import *


class Tagged(torch.Tensor):
    @staticmethod
    def make(data):
        found = data.as_subclass(Tagged)
        found.uses = 0
        return found


scale = Tagged.make(torch.ones(1))


def loss(model, batch):
    scale.uses += 1
    return mse(model, batch) * (1 + 0.1 * scale.uses)


fit(loss)
