"""State in a name-mangled attribute of a base class, and a class variable of another."""

# expect: exact

from toy import *


class Base:
    def __init__(self):
        self.__level = 1.0

    def raise_level(self):
        self.__level *= 1.1
        return self.__level


class Derived(Base):
    offsets = [0.1]

    def weight(self):
        self.offsets.append(self.offsets[-1] * 1.2)
        return self.raise_level() + self.offsets[-1]


weights = Derived()


def loss(model, batch):
    return mse(model, batch) * weights.weight()


fit(loss)
