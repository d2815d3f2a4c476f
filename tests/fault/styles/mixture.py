"""A mixture of two data sets with the interface of Hugging Face's `IterableDataset`: `set_epoch`, samples as dicts."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dtctl.runtime import Trainer, run
from tests.fault.styles.final import save_weights


class Texts(IterableDataset):
    """`datasets.load_dataset(..., streaming=True).shuffle(seed)`: another order in each epoch."""

    def __init__(self, number, size):
        self.number, self.size, self.epoch = number, size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(self.size))
        random.Random(1000 * self.number + self.epoch).shuffle(order)
        for index in order:
            draws = random.Random(f"{self.number} {index}")
            yield {"input_ids": torch.tensor([draws.randrange(11) for _ in range(8)]), "source": self.number}


class Mixture(IterableDataset):
    """`datasets.interleave_datasets(sets, probabilities, seed)`; ends with the first that ends."""

    def __init__(self, sets, probabilities):
        self.sets, self.probabilities, self.epoch = sets, probabilities, 0

    def set_epoch(self, epoch):
        self.epoch = epoch
        for each in self.sets:
            each.set_epoch(epoch)

    def __iter__(self):
        iterators, draws = [iter(each) for each in self.sets], random.Random(self.epoch)
        while True:
            sample = next(draws.choices(iterators, self.probabilities)[0], None)
            if sample is None:
                return
            yield sample


def loss(model, batch):
    tokens = batch["input_ids"]
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(config, worker):
    torch.set_default_dtype(torch.float64)
    mixture = Mixture([Texts(0, 60), Texts(1, 90)], [0.4, 0.6])
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 11))
    trainer = Trainer(config, worker, model, loss, DataLoader(mixture, batch_size=4))
    outcome = trainer.run()
    save_weights(trainer.full_weights())
    return outcome


if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"global_batch": 16, "steps": 18}))
