"""`strategy: auto` on two workers: memory decides, all come to the same, and a run that goes on stays with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import command_line, forked
from tests.facts import missing

pytestmark = pytest.mark.torch

SCRIPT = """
import dataclasses, os, signal
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

BLOCKS, WIDTH = 20, 800  # 12.8 million parameters: 0.19 GiB of states

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(WIDTH, 1)

    def forward(self, stream):
        for block in self.blocks:
            stream = torch.relu(block(stream))
        return self.last(self.drop(stream))

def train(config, worker):
    if "UNLIKE" in os.environ and worker.rank == 1:
        config = dataclasses.replace(config, strategy="ddp")
    data = TensorData(torch.randn(64, WIDTH), torch.randn(64, 1))

    def loss(model, batch):
        if trainer and trainer[0].step == 3 and worker.rank == 1 and "DIES" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = []
    trainer.append(Trainer(config, worker, Model if "LATER" in os.environ else Model(), loss, data))
    os.write(1, f"rank {worker.rank}: {trainer[0].training.engine.strategy.name}\\n".encode())
    return trainer[0].run()

if __name__ == "__main__":
    defaults = {"micro_batch": 4, "steps": 4, "log_every": 1, "snapshot": {"every_steps": 1, "dir": "snapshots"}}
    raise SystemExit(run(train, defaults=defaults))
"""
TIGHT = "--train.memory_gib=0.54"
"""GiB in which ddp and zero1 have no room, beside what a process needs."""


def launch(folder: Path, *argv: str, **environ: str) -> forked.Ended:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    return forked.launch(["train.py", *argv], 2, cwd=folder, environ=environ)


def digest(folder: Path) -> str:
    done = command_line.dtctl("snapshot", "digest", str(folder / "snapshots"), "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["digest"])


@pytest.mark.slow
def test_a_memory_limit_leads_to_fsdp_and_its_bits(tmp_path: Path) -> None:
    chosen = launch(tmp_path / "auto", TIGHT)
    assert chosen.code == 0, chosen.output
    figure = r"\d\.\d\d"
    said = (
        rf"strategy: fsdp, since ddp needs {figure} GiB \(states 0\.19, overhead {figure}\) of 0\.54 GiB per worker, "
        rf"zero1 {figure}; fsdp needs {figure}\n"
    )
    assert len(re.findall(said, chosen.output)) == 1, chosen.output
    assert not missing(chosen.output, "rank 0 fsdp")
    assert not missing(chosen.output, "rank 1 fsdp")
    named = launch(tmp_path / "named", "--train.strategy=fsdp")
    assert named.code == 0, named.output
    assert "strategy:" not in named.output
    assert digest(tmp_path / "auto") == digest(tmp_path / "named")
    later = launch(tmp_path / "later", TIGHT, LATER="rank 1 fsdp")
    assert not missing(later.output, "rank 1 fsdp")
    assert digest(tmp_path / "later") == digest(tmp_path / "named")


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_as_it_was(tmp_path: Path) -> None:
    straight = launch(tmp_path / "straight", TIGHT)
    assert straight.code == 0, straight.output
    killed = launch(tmp_path / "killed", TIGHT, DIES="rank 1 fsdp")
    assert killed.code != 0
    again = launch(tmp_path / "killed", TIGHT)
    assert "strategy: fsdp, chosen by the run that wrote the snapshot" in again.output, again.output
    assert re.search(r"resumed at step [123] of 4: nothing known differs", again.output), again.output
    assert "not exact: " not in again.output
    assert digest(tmp_path / "killed") == digest(tmp_path / "straight")
    wide = launch(tmp_path / "killed", "--train.steps=5")
    assert not missing(wide.output, "ddp 0.19 GiB")


def test_what_does_not_fit_is_refused_on_all_workers(tmp_path: Path) -> None:
    ended = launch(tmp_path, "--train.memory_gib=0.3")
    assert ended.output.count("error: no strategy fits the memory: fsdp needs 0.5") == 2, ended.output
    assert ended.output.count("of 0.30 GiB per worker, 0.2") == 2
    assert "ended with exit code 4" in ended.output


def test_workers_that_were_told_otherwise_hear_of_it(tmp_path: Path) -> None:
    ended = launch(tmp_path, UNLIKE="rank 1 fsdp")
    assert ended.output.count("error: the workers do not agree on the settings (checksum): ") == 2, ended.output


def test_there_is_room_for_ddp_where_nothing_limits_it(tmp_path: Path) -> None:
    ended = launch(tmp_path, "--train.memory_gib=8", LATER="rank 1 fsdp")
    assert ended.code == 0, ended.output
    assert not missing(ended.output, "ddp 0.19 8.00 GiB")
