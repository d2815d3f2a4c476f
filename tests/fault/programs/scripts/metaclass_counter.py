"""Counts instances in the metaclass, and every step makes one."""

# expect: exact

from toy import *


class Counting(type):
    made = 0

    def __call__(cls, *args):
        Counting.made += 1
        return super().__call__(*args)


class Term(metaclass=Counting):
    def __init__(self, value):
        self.value = value

    def scaled(self):
        return self.value * (1 + 0.1 * Counting.made)


def loss(model, batch):
    return Term(mse(model, batch)).scaled()


fit(loss)
