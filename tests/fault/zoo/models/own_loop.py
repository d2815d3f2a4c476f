"""A loop of one's own, without a Trainer, which uses only the functions for snapshots."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dtctl.runtime.snapshot import Saver, load_optimizer, newest, optimizer_tree
from tests.fault.zoo.models.data import regression
from tests.fault.zoo.models.ending import leave, tick
from tests.fault.zoo.models.networks import Net
from tests.fault.zoo.models.parts import WIDTH, Altered


def gan(options: Mapping[str, Any], altered: Altered) -> int:
    """Two models and two optimizers in a loop of one's own."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    data = regression(options).tensors[0]
    maker, judge = nn.Sequential(nn.Linear(4, 16), nn.Dropout(options["dropout"]), nn.Linear(16, WIDTH)), Net(options)
    both = nn.ModuleDict({"maker": maker, "judge": judge})
    first = torch.optim.Adam(maker.parameters(), lr=0.01)
    second = getattr(torch.optim, options["optimizer"])(judge.parameters(), lr=0.01, weight_decay=options["decay"])
    schedule = torch.optim.lr_scheduler.StepLR(second, 3)
    folder = Path("snapshots")
    with Saver(folder, keep=2) as saver:
        step = 0
        if found := newest(folder):
            step = found.step
            both.load_state_dict(found.parts["model"])
            load_optimizer(maker, first, found.parts["first"])
            load_optimizer(judge, second, found.parts["second"])
            schedule.load_state_dict(found.facts["schedule"])
            for group, lr in zip(second.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = lr
            torch.set_rng_state(found.parts["random"].clone())
            print(f"resumed at step {step}: nothing known differs", flush=True)
        while step < 12:
            tick(0)
            real = data[torch.randint(0, len(data), (8,))]
            fake = maker(torch.randn(8, 4))
            true, false = nn.functional.softplus(-judge(real)), nn.functional.softplus(judge(fake.detach()))
            second.zero_grad()
            altered(true.mean() + false.mean()).backward()  # type: ignore[no-untyped-call]
            second.step()
            first.zero_grad()
            altered(nn.functional.softplus(-judge(fake)).mean()).backward()  # type: ignore[no-untyped-call]
            first.step()
            schedule.step()
            step += 1
            if step % 2 == 0:
                state = {"first": optimizer_tree(maker, first), "second": optimizer_tree(judge, second)}
                parts = {"model": both.state_dict(), **state, "random": torch.get_rng_state()}
                saver.save(step, parts, facts={"schedule": schedule.state_dict()})
    leave(0, both, second, {"first": first, "schedule": schedule})
    return 0
