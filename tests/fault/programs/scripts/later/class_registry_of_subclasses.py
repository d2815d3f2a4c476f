"""A base class that gathers subclasses, each of which counts."""

# expect: exact

from toy import *


class Term:
    kinds = []
    used = 0

    def __init_subclass__(cls):
        Term.kinds.append(cls)

    @classmethod
    def weight(cls):
        cls.used += 1
        return 1 + 0.1 * cls.used


class Square(Term):
    pass


class Absolute(Term):
    pass


def loss(model, batch):
    error = model(batch[0]) - batch[1]
    return error.square().mean() * Square.weight() + error.abs().mean() * Term.kinds[1].weight()


fit(loss)
