"""Images that lie channel by channel, on several workers: the same training, with the same bits after a stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.torch

SCRIPT = """
import hashlib, os, torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

def train(config, worker):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(288, 1))
    inputs = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    loss = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])
    trainer = Trainer(config, worker, model, loss, TensorData(inputs, inputs.mean((1, 2, 3))[:, None]))
    outcome = trainer.run()
    found, first = hashlib.blake2b(digest_size=8), next(model.parameters())
    for value in model.state_dict().values():
        found.update(value.contiguous().numpy().tobytes())
    last = first.is_contiguous(memory_format=torch.channels_last)
    os.write(1, f"digest {found.hexdigest()} last {last} sum {float(first.double().sum()):.4f}\\n".encode())
    return outcome

if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"micro_batch": 2, "steps": 8, "schedule": "constant"}))
"""


def train(folder: Path, *settings: str) -> set[tuple[str, ...]]:
    """Digest, form and sum of the weights of all workers."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    argv = [str(folder / "train.py"), *(f"--train.{one}" for one in settings)]
    ended = forked.launch(argv, 2, cwd=folder, environ={})
    assert ended.code == 0, ended.output
    return {tuple(line.split()[1::2]) for line in ended.output.splitlines() if line.startswith("digest ")}


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_workers_stay_alike_and_a_resume_has_the_same_bits(tmp_path: Path, strategy: str) -> None:
    settings = (f"strategy={strategy}", "channels_last=true")
    ((digest, last, total),) = train(tmp_path / "whole", *settings)
    assert last == "True"
    train(tmp_path / "parts", *settings, "steps=4")
    ((again, _, _),) = train(tmp_path / "parts", *settings, "on_resize=keep")
    ((_, plain, other),) = train(tmp_path / "plain", f"strategy={strategy}")
    assert (again, plain) == (digest, "False")
    assert float(total) == pytest.approx(float(other), abs=0.05)
