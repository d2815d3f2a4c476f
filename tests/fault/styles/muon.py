"""Muon for the matrices of an MLP, AdamW for its vectors: `train.optimizer: muon`."""

import torch
from torch import nn

from dtctl.runtime import TensorData, Trainer, run
from tests.fault.styles.final import save_weights


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def train(config, worker):
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    data = TensorData(inputs, inputs.cumsum(1)[:, :3].sin())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    trainer = Trainer(config, worker, model, loss, data)
    outcome = trainer.run()
    save_weights(trainer.full_weights())
    return outcome


if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"optimizer": "muon", "lr": 0.02, "global_batch": 16, "steps": 18}))
