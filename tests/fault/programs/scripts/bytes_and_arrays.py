"""State in array.array and bytearray."""

# expect: exact

from array import array
from toy import *

sums, flags = array("d", [0.0, 0.0]), bytearray(4)


def loss(model, batch):
    sums[0] += batch[1].mean().item()
    flags[int(sums[0] * 100) % 4] += 1
    return mse(model, batch) * (1 + sums[0] ** 2 + 0.1 * flags[0])


fit(loss)
