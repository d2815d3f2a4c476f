"""A temperature in a context variable."""

# expect: exact

import contextvars
from toy import *

temperature = contextvars.ContextVar("temperature", default=1.0)


def loss(model, batch):
    temperature.set(temperature.get() * 0.9)
    return mse(model, batch) / temperature.get()


fit(loss)
