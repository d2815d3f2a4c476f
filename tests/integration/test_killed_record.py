"""A worker is killed at any point from a snapshot to the second step after it: the verdict on the resume is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtctl.runtime.snapshot import commands
from tests import forked
from tests.verdicts import is_unrecorded, read_verdict

pytestmark = pytest.mark.torch

SCRIPT = """
import os, signal
from pathlib import Path
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run
from dtctl.runtime.snapshot import saver, write

POINT, LAST, NAME = os.environ["POINT"], 6, "step-00000006"

def die(point):
    if point == POINT and os.environ.get("RANK", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)

def before(module, name, point, *, of):
    real = getattr(module, name)
    def replaced(*args, **named):
        if any(NAME in str(arg) for arg in args[:of]):
            die(point)
        return real(*args, **named)
    setattr(module, name, replaced)

rows, annotate, replace = 0, saver.Saver.annotate, Path.replace

def annotated(self, step, *args):
    global rows
    if step == LAST:
        self.wait()  # the snapshot is whole, however busy the disk
        rows += 1
        die(f"before row {rows}")
    annotate(self, step, *args)
    if step == LAST:
        die(f"behind row {rows}")

def replaced(self, target):
    if Path(target).name == "next-steps.json" and NAME in str(target):
        die(f"within row {rows}")
    return replace(self, target)

before(write, "write_part", "files", of=1)
before(write, "write_commit_record", "commit", of=1)
before(write, "publish_draft", "name", of=1)
saver.Saver.annotate, Path.replace = annotated, replaced

def train(config, worker):
    inputs = torch.randn(90, 8, generator=torch.Generator().manual_seed(5))
    model = nn.Sequential(nn.Linear(8, 30), nn.Dropout(0.2), nn.ReLU(), nn.Linear(30, 1))
    loss = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])
    return Trainer(config, worker, model, loss, TensorData(inputs, inputs[:, :1])).run()

if __name__ == "__main__":
    raise SystemExit(run(train, defaults={
        "global_batch": 4, "steps": 9, "log_every": 3, "timeout_s": 60, "snapshot": {"every_steps": 3, "keep": 3},
    }))
"""
POINTS = {
    "files": "exact: steps 4 to 5 repeated",
    "commit": "exact: steps 4 to 5 repeated",
    "name": "exact: steps 4 to 5 repeated",
    "before row 1": "step 7 was not recorded",
    "within row 1": "step 7 was not recorded",
    "behind row 1": "exact: step 7 repeated",
    "before row 2": "exact: step 7 repeated",
    "within row 2": "exact: step 7 repeated",
    "behind row 2": "exact: steps 7 to 8 repeated",
}
"""Where the first worker is killed, and what can be said then."""


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [
        (1, "ddp"),
        pytest.param(2, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp", marks=pytest.mark.slow),
        pytest.param(2, "zero1", marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_point_until_the_second_step_the_verdict_is_true(
    tmp_path: Path, workers: int, strategy: str
) -> None:
    def launch(name: str, point: str = "") -> forked.Ended:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)
        argv = ["train.py", f"--train.strategy={strategy}"]
        return forked.launch(argv, workers, cwd=folder, environ={"POINT": point})

    def digest(name: str) -> object:
        return commands.compute_snapshot_digest(tmp_path / name / "snapshots")["digest"]

    straight = launch("straight")
    assert straight.code == 0, straight.output
    for point, said in POINTS.items():
        killed = launch(point, point)
        assert "rank 0 ended by SIGKILL" in killed.output, (point, killed.output)
        resumed = launch(point)
        assert resumed.code == 0, (point, resumed.output)
        verdict = read_verdict(resumed.output)
        assert verdict == "exact" or is_unrecorded(verdict), (point, resumed.output)
        assert said in resumed.output, (point, resumed.output)
        assert digest(point) == digest("straight"), point
