"""The disk is full in mid-save: that is said, what was there stays good, and training goes on if allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facts import missing

pytestmark = pytest.mark.torch

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run
from dtctl.runtime.snapshot import commands

folder, ballast = Path("disk/snapshots"), Path("disk/ballast")

def train(config, worker):
    inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))  # 0.4 MiB with AdamW's moments

    def loss(model, batch):
        if trainer.step == 2:  # the snapshot of step 2 is whole; that of step 4 finds room for a third
            trainer.training.snapshots.saver.wait()
            free = os.statvfs("disk").f_bavail * os.statvfs("disk").f_frsize
            ballast.write_bytes(bytes(free - 150_000))
        if trainer.step == 5:
            trainer.training.snapshots.saver.wait()
            found = commands.verify_snapshots(folder)
            print("AT 5", json.dumps([[row["step"], row["status"]] for row in found["snapshots"]]),
                  [path.name for path in folder.iterdir() if path.name.endswith(".draft")], flush=True)
            ballast.unlink()
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(config, worker, model, loss, TensorData(inputs, inputs.sum(1, keepdim=True)))
    outcome = trainer.run()
    verified = commands.verify_snapshots(folder)["snapshots"]
    print("AT END", json.dumps([[row["step"], row["status"]] for row in verified]))
    return outcome

if __name__ == "__main__":
    settings = {"micro_batch": 4, "steps": 8, "snapshot": {"every_steps": 2, "keep": 1, "dir": str(folder)}}
    raise SystemExit(run(train, defaults=settings))
"""


def launch(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Train with a disk of 1.5 MiB, which is gone afterwards."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "disk").mkdir()
    mount = 'mount -t tmpfs -o size=1500k none disk && exec "$@"'
    return subprocess.run(
        [
            *["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"],
            *[sys.executable, "train.py", *(f"--train.{setting}" for setting in settings)],
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_training_goes_on_and_the_next_save_succeeds(tmp_path: Path) -> None:
    done = launch(tmp_path)
    assert done.returncode == 0, done.stderr
    assert not missing(done.stderr, "snapshot step 4 Errno 28")
    assert "hint: free space, or set `train.snapshot.dir`; older snapshots are untouched" in done.stderr
    assert f"AT 5 {json.dumps([[2, 'ok']])} []" in done.stdout, "the older one is intact, and no draft takes room"
    assert f"AT END {json.dumps([[8, 'ok']])}" in done.stdout


def test_it_ends_when_no_failure_is_allowed(tmp_path: Path) -> None:
    done = launch(tmp_path, "snapshot.max_failed_saves=1", "snapshot.every_steps=1", "steps=4")
    assert done.returncode == 10, done.stdout + done.stderr
    assert not missing(done.stderr, "Errno 28")
