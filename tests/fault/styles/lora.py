"""LoRA: a frozen model with adapters of rank 2; snapshots hold the adapters alone."""

import torch
from torch import nn

from dtctl.runtime import TensorData, Trainer, run
from tests.fault.styles.final import save_weights


class Adapted(nn.Module):
    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, inputs):
        return self.linear(inputs) + inputs @ self.down.T @ self.up.T


def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def train(config, worker):
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    data = TensorData(inputs, inputs.cumsum(1)[:, :3].sin())
    torch.manual_seed(7)  # in place of pretrained weights
    model = nn.Sequential(Adapted(nn.Linear(8, 64)), nn.Tanh(), Adapted(nn.Linear(64, 3)))
    trainer = Trainer(config, worker, model, loss, data)
    outcome = trainer.run()
    save_weights(trainer.full_weights())
    return outcome


if __name__ == "__main__":
    defaults = {"global_batch": 16, "steps": 18, "lr": 0.02, "snapshot": {"trained_only": True}}
    raise SystemExit(run(train, defaults=defaults))
