"""A training loop of one's own with dtctl's snapshots: kill it whenever you like, start it again, and it goes on.

python examples/own_loop.py SNAPSHOTS
"""

import sys
from pathlib import Path

import torch
from torch import nn

from dtctl.runtime.snapshot import Saver, load_optimizer, load_random_state, newest, optimizer_tree, random_state

folder, steps = Path(sys.argv[1]), 60
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters())

with Saver(folder, keep=2) as saver:
    step = 0
    if found := newest(folder):
        step = found.step
        model.load_state_dict(found.parts["model"])
        load_optimizer(model, optimizer, found.parts["optimizer"])
        load_random_state(found.parts["random"])
        print(f"going on from step {step}", *found.rejected)
    while step < steps:
        inputs = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 20 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer_tree(model, optimizer)}
            saver.save(step, {**state, "random": random_state()}, facts={"loss": loss.item()})
