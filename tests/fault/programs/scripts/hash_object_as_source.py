"""Pseudo-random numbers from a hash object that is fed on and on."""

# expect: not exact

import hashlib
from toy import *

digest = hashlib.sha256(b"seed")


def loss(model, batch):
    digest.update(b"next")
    return mse(model, batch) * (1 + digest.digest()[0] / 256)


fit(loss)
