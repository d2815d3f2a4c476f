"""Fit a line with DistributedDataParallel: stands in for your own script. Needs torch and nothing of dtctl."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Read the place in the job from the environment, train, leave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.02)
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()

    model = DistributedDataParallel(nn.Linear(4, 1).to(device), device_ids=[local_rank] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    source = torch.Generator().manual_seed(rank)  # each worker has data of its own
    weights = torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    for step in range(1, options.steps + 1):
        inputs = torch.randn(32, 4, generator=source)
        targets = inputs @ weights + 1 + 0.1 * torch.randn(32, 1, generator=source)
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}/{options.steps}  loss {loss.item():.6f}  on {workers} workers", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
