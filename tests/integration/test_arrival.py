"""A model that is made by a function: the workers that do not make it have a share of it and one block at most."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked
from tests.facts import missing

pytestmark = pytest.mark.torch

SCRIPT = """
import os, re, sys
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

BLOCKS, WIDTH = 24, 2400  # some 550 MB, against which what torch itself needs is little
made_on = []

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.blocks[0].weight if "TIED" in os.environ else self.last.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)
        made_on.append(self.scale.device.type)
        if "LOOKS" in os.environ:
            assert self.scale.sum().item() > 0

    def forward(self, stream):
        for block in self.blocks:
            stream = torch.relu(block(stream * self.scale))
        return self.last(stream)

def peak_mb():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

def train(config, worker):
    data = TensorData(torch.randn(64, WIDTH), torch.randn(64, WIDTH))
    loss = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])
    Trainer(config, worker, lambda: nn.Sequential(nn.Linear(8, 8)), loss, data)  # torch's code comes into memory
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = peak_mb()
    trainer = Trainer(config, worker, Model, loss, data)
    more = peak_mb() - before
    os.write(1, f"rank {worker.rank} {made_on} {more:.0f} MB\\n".encode())
    assert not any(value.is_meta for value in [*trainer.model.parameters(), *trainer.model.buffers()])
    assert float(trainer.model.scale.sum()) == WIDTH / 2
    return trainer.run()

if __name__ == "__main__":
    defaults = {"micro_batch": 2, "steps": 2, "strategy": "fsdp", "optimizer": "sgd", "momentum": 0.0}
    raise SystemExit(run(train, defaults=defaults))
"""
WHOLE_MB = 25 * 2400 * 2400 * 4 / 2**20


def launch(folder: Path, *argv: str, **environ: str) -> forked.Ended:
    (folder / "train.py").write_text(SCRIPT)
    return forked.launch(["train.py", *argv], 2, cwd=folder, environ=environ)


@pytest.mark.slow
def test_a_worker_that_does_not_make_the_model_never_has_it_whole(tmp_path: Path) -> None:
    ended = launch(tmp_path)
    assert ended.code == 0, ended.output
    told = [line.split() for line in ended.output.splitlines() if line.startswith("rank ")]
    found = {int(rank): (made_on, float(size)) for _, rank, made_on, size, _ in told}
    assert found[0][0] == "['cpu']"
    assert found[1][0] == "['meta']"
    assert found[0][1] > WHOLE_MB
    assert found[1][1] < 0.75 * WHOLE_MB, "half of it, and what passes through"


@pytest.mark.slow
def test_other_strategies_make_it_everywhere(tmp_path: Path) -> None:
    ended = launch(tmp_path, "--train.strategy=ddp")
    assert ended.code == 0, ended.output
    assert ended.output.count("['cpu']") == 2


def test_code_that_looks_at_values_is_refused_where_there_are_none(tmp_path: Path) -> None:
    ended = launch(tmp_path, LOOKS="1")
    assert not missing(ended.output, "model meta device Tensor.item")
    assert ended.code != 0


def test_parameters_that_blocks_share_are_refused_and_not_parted(tmp_path: Path) -> None:
    ended = launch(tmp_path, TIED="1")
    message = "error: blocks.0.weight and last.weight are one parameter in several blocks"
    assert ended.output.count(message) == 2, ended.output
