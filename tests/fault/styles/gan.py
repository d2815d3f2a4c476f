"""A GAN: two models, two optimizers, two losses in a step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dtctl.runtime import session
from tests.fault.styles.final import gather_weights, save_weights
from tests.fault.styles.spread import begin, spread


def main():
    _, workers = begin()
    maker, critic = spread(nn.Linear(3, 4)), spread(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    models = {"maker": maker, "critic": critic}
    steps = {name: torch.optim.Adam(model.parameters(), 0.01) for name, model in models.items()}
    # The noise is part of the data, so that each sample has the same one on any number of workers.
    data = TensorDataset(torch.randn(96, 3), torch.randn(96, 4) + 1)
    loader = DataLoader(data, 16 // workers, sampler=DistributedSampler(data))
    with session(models, steps, loader, every_steps=4) as s:
        for _ in s.epochs(3):
            for noise, real in s.batches:
                made = maker(noise)
                judged = critic(torch.cat([made.detach(), real]))
                s.backward(judged[: len(made)].mean() - judged[len(made) :].mean())
                s.update("critic")
                loss = -critic(made).mean()
                s.backward(loss)
                s.update("maker")
                s.end_step(loss)
    save_weights(gather_weights(models))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
