"""A program with torch.compile and checkpoints of its own, without dtctl.runtime: dtctl launches and restarts it."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.fault.styles.final import gather_weights, save_weights

CHECKPOINT = Path(os.environ.get("STYLES_CHECKPOINT", "checkpoint.pt"))


def main():
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    inputs = torch.randn(96, 8)
    data = TensorDataset(inputs, inputs.cumsum(1)[:, :3].sin())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16 // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    first = 0
    if CHECKPOINT.exists():
        found = torch.load(CHECKPOINT)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["epoch"]
        print(f"continued with epoch {first}", flush=True)
    dist.barrier()
    for epoch in range(first, 3):
        sampler.set_epoch(epoch)
        for features, targets in loader:
            loss = nn.functional.mse_loss(compiled(features), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                with open("metrics.jsonl", "a") as log:
                    log.write(json.dumps({"epoch": epoch, "loss": loss.item()}) + "\n")
        if dist.get_rank() == 0:
            draft = CHECKPOINT.with_suffix(".draft")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, draft)
            draft.replace(CHECKPOINT)
    save_weights(gather_weights({"model": model}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
