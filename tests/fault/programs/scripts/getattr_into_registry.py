"""Values live behind __getattr__, in a registry of the module keyed by object."""

# expect: not exact

import weakref
from toy import *

_values = weakref.WeakKeyDictionary()


class Lazy:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _values.setdefault(self, {}).get(name, 0.0)

    def __setattr__(self, name, value):
        _values.setdefault(self, {})[name] = value


state = Lazy()


def loss(model, batch):
    state.level = state.level + 0.1
    return mse(model, batch) * (1 + state.level)


fit(loss)
