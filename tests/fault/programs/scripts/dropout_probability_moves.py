"""p of a Dropout is raised by a schedule object without state_dict."""

# expect: exact

from toy import *


class DropoutScheduler:
    def __init__(self, model):
        self.layers = [m for m in model.modules() if isinstance(m, nn.Dropout)]
        self.epoch = 0

    def step(self):
        self.epoch += 1
        for layer in self.layers:
            layer.p = 0.05 * self.epoch


def train(config, worker):
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.0), nn.ReLU(), nn.Linear(16, 1))
    scheduler = DropoutScheduler(model)

    def loss(model, batch):
        scheduler.step()
        return mse(model, batch)

    return finish(Trainer(config, worker, model, loss, data()))


start(train)
