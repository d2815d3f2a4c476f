"""A nested structure of lists, tuples, tensors and arrays."""

# expect: exact

from toy import *

store = {"a": [{"t": (torch.zeros(1), [np.zeros(2)])}, None], "b": ((1, [2.0]),)}


def loss(model, batch):
    store["a"][0]["t"][1][0] = store["a"][0]["t"][1][0] * 0.5 + 1
    store["a"][0]["t"][0].add_(0.1)
    store["b"][0][1][0] *= 1.1
    store["a"][1] = (store["a"][1] or 0) + 1
    gain = store["a"][0]["t"][1][0].sum() + store["a"][0]["t"][0].item() + store["b"][0][1][0] + store["a"][1]
    return mse(model, batch) * float(gain)


fit(loss)
