"""An endless stream with random augmentation and a shuffle buffer."""

import random

import torch
from torch import nn
from torch.utils.data import IterableDataset

from dtctl.runtime import Trainer, run
from tests.fault.styles.final import save_weights


class Augmented(IterableDataset):
    def __iter__(self):
        buffer = []
        for number in range(100_000):
            clean = torch.sin(torch.arange(6) * (1 + number % 7))
            buffer.append((clean + 0.1 * torch.randn(6), clean[:1].exp()))
            if len(buffer) == 20:
                yield buffer.pop(random.randrange(20))


def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def train(config, worker):
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    trainer = Trainer(config, worker, model, loss, Augmented())
    outcome = trainer.run()
    save_weights(trainer.full_weights())
    return outcome


if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"global_batch": 16, "steps": 18}))
