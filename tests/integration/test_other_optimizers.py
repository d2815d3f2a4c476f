"""What a program trains beside the Trainer's model is the same on all workers, or an error names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked
from tests.facts import missing

pytestmark = pytest.mark.torch

SCRIPT = """
import os
import torch, torch.distributed as dist
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

def train(config, worker):
    maker, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)

    def loss(model, batch):
        (real,) = batch
        fake = model(torch.randn_like(real))
        second.zero_grad()
        nn.functional.softplus(critic(fake.detach()) - critic(real)).mean().backward()
        if os.environ["MODE"] == "averaged":
            for parameter in critic.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= worker.world_size
        second.step()
        return nn.functional.softplus(-critic(fake)).mean()

    data = TensorData(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
    return Trainer(config, worker, maker, loss, data).run()

if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"micro_batch": 4, "steps": 12, "log_every": 4, "timeout_s": 60}))
"""


def launch(folder: Path, mode: str, strategy: str) -> forked.Ended:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return forked.launch(["train.py", f"--train.strategy={strategy}"], 2, cwd=folder, environ={"MODE": mode})


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_critic_that_nobody_averages_is_an_error(tmp_path: Path, strategy: str) -> None:
    ended = launch(tmp_path / "run", "alone", strategy)
    assert ended.code != 0, ended.output
    assert not missing(ended.output, "step 1 critic Linear")
    assert "all_reduce" in ended.output


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_critic_whose_gradients_are_averaged_trains(tmp_path: Path, strategy: str) -> None:
    ended = launch(tmp_path / "run", "averaged", strategy)
    assert ended.code == 0, ended.output
