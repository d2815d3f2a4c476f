"""Counter, OrderedDict, ChainMap, UserDict."""

# expect: exact

from collections import ChainMap, Counter, OrderedDict, UserDict
from toy import *

signs, order, layers, own = Counter(), OrderedDict(a=1.0, b=2.0, c=3.0), ChainMap({}, {"gain": 1.0}), UserDict()


def loss(model, batch):
    signs.update((batch[1][:, 0] > 0).tolist())
    order.move_to_end(next(iter(order)))
    layers["gain"] = layers["gain"] * 1.05
    own["sum"] = own.get("sum", 0.0) + batch[1].sum().item()
    first = next(iter(order.values()))
    return mse(model, batch) * (first + 0.1 * signs[True]) * layers["gain"] + 0.01 * own["sum"] * model(batch[0]).mean()


fit(loss)
