"""Infinity, minus zero, NaN, a large integer, a complex number."""

# expect: exact

from toy import *

odd = {"best": math.inf, "zero": -0.0, "nan": math.nan, "large": 3**200, "complex": 1 + 0j}


def loss(model, batch):
    value = mse(model, batch)
    odd["best"] = min(odd["best"], value.item())
    odd["large"] += 3**199
    odd["complex"] *= 1j
    odd["zero"] = -odd["zero"]
    sign = math.copysign(1.0, odd["zero"])
    return value * (1 + odd["best"] + odd["large"] / 3**201 + 0.2 * odd["complex"].real + 0.1 * sign)


fit(loss)
