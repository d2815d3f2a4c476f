"""A training in a loop of its own, as a program has it; `plain` is the same without dtctl.

python own_loop.py KIND, where KIND is plain, ddp or fsdp. DTCTL_TEST_PACE is the pause of a step in seconds,
DTCTL_TEST_EPOCHS the length, DTCTL_TEST_OWN=1 gives each worker a state of its own, DTCTL_TEST_ROWS the
number of samples of rank 1 that are left out.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from dtctl.runtime import session

EPOCHS = int(os.environ.get("DTCTL_TEST_EPOCHS", "4"))


class Noisy(Dataset):
    """Samples that draw random numbers whenever they are read."""

    def __init__(self, count=160):
        self.inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(8), self.inputs[index].sum()[None]


class Seen:
    def __init__(self, rank):
        self.state = {"rank": rank}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def score(model, data):
    model.eval()
    with torch.no_grad():
        total = sum(nn.functional.mse_loss(model(inputs), targets).item() for inputs, targets in DataLoader(data, 8))
    model.train()
    return total


def main(kind):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1))
    if kind == "fsdp":
        fully_shard(model[2])
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    torch.manual_seed(100 + rank)
    data = Noisy()
    short = int(os.environ.get("DTCTL_TEST_ROWS", "0")) if rank == 1 else 0
    loader = DataLoader(data, 8, sampler=DistributedSampler(data, seed=2))
    if short:
        loader = DataLoader(Subset(data, range(len(data) // world - short)), 8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    pace = float(os.environ.get("DTCTL_TEST_PACE", "0"))
    if kind == "plain":
        for epoch in range(EPOCHS):
            loader.sampler.set_epoch(epoch)
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
            score(model, Noisy(20))
    else:
        own = {"seen": Seen(rank)} if os.environ.get("DTCTL_TEST_OWN") == "1" else {}
        with session(model, optimizer, loader, schedule=schedule, clip=1.0, every_steps=3, extra_state=own) as s:
            for _ in s.epochs(EPOCHS):
                for inputs, targets in s.batches:
                    time.sleep(pace)
                    s.step(nn.functional.mse_loss(model(inputs), targets))
                    with open(f"steps.{rank}", "a") as file:
                        file.write(".")
                score(model, Noisy(20))
    whole = [each.full_tensor() if kind == "fsdp" else each for each in model.parameters()]
    if rank == 0:
        torch.save([tensor.detach() for tensor in whole], "final.pt")
    del model  # else torch's reducer would leave the group, and can hang there: see keep_gloo_groups
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
