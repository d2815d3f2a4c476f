"""A training loop of one's own with DistributedDataParallel, in a session: kill it at any time, and start it again.

torchrun --nproc-per-node 2 examples/session.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dtctl.runtime import session

EPOCHS = 6


def main():
    """Train, and save the weights."""
    dist.init_process_group("gloo")  # "nccl" with GPUs
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    layers = nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = EPOCHS * len(loader)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    torch.manual_seed(dist.get_rank())  # each worker drops other units
    with session(model, optimizer, loader, schedule=rate, clip=1.0, every_s=60) as s:
        for epoch in s.epochs(EPOCHS):
            for features, targets in s.batches:
                loss = nn.functional.mse_loss(model(features), targets)
                s.step(loss)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: {s.steps_done} steps", flush=True)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
