"""The loss keeps a trace per parameter in the optimizer's state."""

# expect: exact

from toy import *


def train(config, worker):
    def loss(model, batch):
        total = mse(model, batch)
        for p in model.parameters():
            state = trainer.optimizer.state[p]
            state["trace"] = 0.9 * state.get("trace", 0.0) + 0.1
            total = total + state["trace"] * 0.05 * p.square().sum()
        return total

    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = Trainer(config, worker, mlp(), loss, data(), optimizer=make)
    return finish(trainer)


start(train)
