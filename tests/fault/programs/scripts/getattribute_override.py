"""__getattribute__ sends every access to another object that only its closure knows."""

# expect: not exact

from toy import *


def make():
    hidden = {"level": 0.0}

    class Proxy:
        def __getattribute__(self, name):
            return hidden[name]

        def __setattr__(self, name, value):
            hidden[name] = value

    return Proxy()


proxy = make()


def loss(model, batch):
    proxy.level = proxy.level + 0.1
    return mse(model, batch) * (1 + proxy.level)


fit(loss)
