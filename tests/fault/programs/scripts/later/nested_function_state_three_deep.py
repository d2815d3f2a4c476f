"""Closures in closures."""

# expect: exact

from toy import *


def outer():
    a = 1.0

    def middle():
        b = [0.5]

        def inner():
            nonlocal a
            a *= 1.05
            b[0] += 0.1
            return a * b[0]

        return inner

    return middle()


weight = outer()


def loss(model, batch):
    return mse(model, batch) * weight()


fit(loss)
