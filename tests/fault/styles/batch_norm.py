"""A convolutional network with BatchNorm, whose statistics are those of each worker's samples."""

import torch
from torch import nn

from dtctl.runtime import TensorData, Trainer, run
from tests.fault.styles.final import save_weights


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def train(config, worker):
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)
    data = TensorData(torch.randn(96, 1, 6, 6, generator=generator), torch.randint(3, (96,), generator=generator))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    trainer = Trainer(config, worker, model, loss, data)
    outcome = trainer.run()
    save_weights(trainer.full_weights())
    return outcome


if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"global_batch": 16, "steps": 18}))
