"""Real workers: what all of them must do at the same step although only one has the reason for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

SCRIPT = """
import json, os
import torch
from torch import nn
from dtctl.runtime import Outcome, TensorData, Trainer, run
from dtctl.runtime.snapshot import state

def network(norm):
    return nn.Sequential(nn.Linear(16, 32), *([nn.BatchNorm1d(32)] if norm else []), nn.ReLU(), nn.Linear(32, 1))

def train(config, worker):
    wish = config.data
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(5))
    data = TensorData(inputs, inputs[:, :1] - inputs[:, 1:2], torch.arange(len(inputs)))
    hurt = wish.get("hurt")
    calls = 0

    def loss(model, batch):
        nonlocal calls
        inputs, targets, ids = batch
        value = nn.functional.mse_loss(model(inputs), targets) if wish.get("late") else None
        calls += 1
        if hurt and [worker.rank, calls] in hurt:
            raise torch.OutOfMemoryError("injected")
        if value is None:
            value = nn.functional.mse_loss(model(inputs), targets)
        with open(f"seen.{worker.rank}", "a") as file:
            file.write(json.dumps([trainer.step, ids.tolist()]) + "\\n")
        if wish.get("nan") == trainer.step and worker.rank == 1:
            value = value * float("nan")
        return value

    trainer = Trainer(config, worker, network(wish.get("norm")), loss, data)
    outcome = trainer.run()
    tree = state.optimizer_tree(trainer.model, trainer.optimizer)
    print("digest", worker.rank, state.digest(dict(trainer.model.named_parameters()), tree), flush=True)
    return outcome

if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"steps": 6, "lr": 1e-2, "log_every": 2, "timeout_s": 30}))
"""


def launch(folder: Path, workers: int, *settings: str) -> tuple[int, str]:
    """Train in `folder` under torchrun. Returns exit code and output."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DTCTL_")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", "train.py"]
    done = subprocess.run(
        [*command, *(f"--train.{setting}" for setting in settings)],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def digests(output: str) -> set[str]:
    return {line.split()[2] for line in output.splitlines() if line.startswith("digest ")}


def samples(folder: Path) -> dict[int, Counter[int]]:
    """What all workers saw in each step."""
    seen: dict[int, Counter[int]] = {}
    for path in folder.glob("seen.*"):
        for step, ids in map(json.loads, path.read_text().splitlines()):
            seen.setdefault(step, Counter()).update(ids)
    return seen


def test_memory_that_runs_out_on_one_worker_makes_all_repeat_the_step(tmp_path: Path) -> None:
    small = launch(tmp_path / "small", 2, "micro_batch=2", "accumulate=2")
    assert small[0] == 0, small[1]
    large = launch(tmp_path / "large", 2, "micro_batch=4", 'data={"hurt": [[1, 1]]}')
    assert large[0] == 0, large[1]
    assert "out of memory on rank 1 in step 1: again with global batch 8 = 2 x 2 x 2" in large[1]
    assert digests(large[1]) == digests(small[1])
    assert len(digests(large[1])) == 1


@pytest.mark.parametrize("late", ["true", "false"])
def test_it_may_happen_in_any_pass_and_with_buffers_that_are_exchanged(tmp_path: Path, late: str) -> None:
    """In the middle of an accumulation, twice, and on both workers at once."""
    wish = f'data={{"hurt": [[1, 4], [0, 14], [1, 14]], "norm": true, "late": {late}}}'
    code, output = launch(tmp_path, 2, "micro_batch=8", "accumulate=2", wish)
    assert code == 0, output
    assert "out of memory on rank 1 in step 2: again with global batch 32 = 4 x 2 x 4" in output
    assert output.count("out of memory on rank") == 2
    assert len(digests(output)) == 1
    straight = launch(tmp_path / "straight", 2, "micro_batch=8", "accumulate=2")
    assert straight[0] == 0, straight[1]
    found, expected = samples(tmp_path), samples(tmp_path / "straight")
    assert all(found[step].keys() >= expected[step].keys() for step in expected)
