"""State in a NamedTuple that is replaced in each step, in the JAX manner."""

# expect: exact

from typing import NamedTuple
from toy import *


class State(NamedTuple):
    mean: torch.Tensor
    count: int


def train(config, worker):
    state = State(torch.zeros(6), 0)

    def loss(model, batch):
        nonlocal state
        inputs, targets = batch
        state = State(0.9 * state.mean + 0.1 * inputs.mean(0), state.count + 1)
        return F.mse_loss(model(inputs - state.mean), targets) * (1 + 0.1 * (state.count % 3))

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
