"""The usual AttrDict: items that are read as attributes."""

# expect: exact

from toy import *


class AttrDict(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self[name] = value


state = AttrDict(step=0, scale=AttrDict(value=1.0))


def loss(model, batch):
    state.step += 1
    state.scale.value *= 1.05
    return mse(model, batch) * state.scale.value * (1 + state.step % 3)


fit(loss)
