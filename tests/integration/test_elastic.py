"""`exact: elastic`: 4, then 2, 1 and 4 workers end with the bits of 4 throughout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtctl.runtime.snapshot import commands
from tests import forked

pytestmark = pytest.mark.torch

SCRIPT = """
import os, signal
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 48), nn.LayerNorm(48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 1))
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs):
        return self.body(inputs)

def train(config, worker):
    inputs = torch.randn(250, 16, generator=torch.Generator().manual_seed(5))

    def loss(model, batch):
        if worker.is_first and trainer.step == trainer.training.position.began_at + int(os.environ["STOP_AFTER"]):
            os.kill(os.getpid(), signal.SIGTERM)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(config, worker, Network(), loss, TensorData(inputs, inputs[:, :1] - inputs[:, 1:2]))
    return trainer.run()

if __name__ == "__main__":
    raise SystemExit(run(train, defaults={
        "micro_batch": 3, "global_batch": 24, "clip_norm": 0.3, "epochs": 4, "lr": 1e-2, "weight_decay": 0.1,
        "log_every": 4, "timeout_s": 60, "exact": "elastic", "require_exact": True, "snapshot": {"every_steps": 100},
    }))
"""


def launch(folder: Path, workers: int, *settings: str, stop_after: int = -1) -> forked.Ended:
    """Train in `folder`, until SIGTERM in a step of this attempt."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    argv = ["train.py", *(f"--train.{setting}" for setting in settings)]
    return forked.launch(argv, workers, cwd=folder, environ={"STOP_AFTER": str(stop_after)})


def test_any_number_of_workers_ends_with_the_same_bits(tmp_path: Path) -> None:
    straight = launch(tmp_path / "straight", 4)
    assert straight.code == 0, straight.output
    expected = commands.compute_snapshot_digest(tmp_path / "straight" / "snapshots")
    assert expected["step"] == 42  # 1,000 samples: the last step has 16, in shards of which one is short and two empty

    folder = tmp_path / "elastic"
    # Workers agree on where to stop some steps after the signal; how many, depends on how busy the machine is.
    for workers, stop_after in ((4, 4), (2, 3), (1, 3), (4, -1)):
        ended = launch(folder, workers, stop_after=stop_after)
        assert (ended.code == 0) == (stop_after < 0), ended.output
        assert "not exact" not in ended.output
    assert "of 42: nothing known differs" in ended.output
    assert re.search(r"exact: steps \d+ to \d+ repeated bit for bit", ended.output)
    assert commands.compute_snapshot_digest(folder / "snapshots")["digest"] == expected["digest"]


def test_what_would_not_be_exact_is_refused(tmp_path: Path) -> None:
    refused = launch(tmp_path / "fsdp", 2, "strategy=fsdp")
    assert refused.code != 0
    assert "exact: elastic is not possible: fsdp divides the state over the workers" in refused.output
