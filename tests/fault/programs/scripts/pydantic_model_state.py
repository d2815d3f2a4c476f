"""Settings and state in a pydantic model, with a private attribute."""

# expect: exact

from pydantic import BaseModel, PrivateAttr
from toy import *


class State(BaseModel):
    gain: float = 1.0
    _hidden: float = PrivateAttr(default=0.5)

    def move(self):
        self.gain *= 1.05
        self._hidden += 0.1
        return self.gain * self._hidden


state = State()


def loss(model, batch):
    return mse(model, batch) * state.move()


fit(loss)
