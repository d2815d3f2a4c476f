"""Exact arithmetic: a Fraction and a Decimal."""

# expect: exact

from decimal import Decimal
from fractions import Fraction
from toy import *

state = {"third": Fraction(1, 3), "tenth": Decimal("0.1")}


def loss(model, batch):
    state["third"] *= Fraction(10, 9)
    state["tenth"] += Decimal("0.1")
    return mse(model, batch) * float(state["third"]) * float(state["tenth"])


fit(loss)
