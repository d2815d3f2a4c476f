"""Fit a curve with Hugging Face Accelerate; resumes from its own checkpoints. Needs nothing of dtctl."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Write a checkpoint, and then, in one go, that it is there."""
    accelerator.save_state(str(folder / f"step_{step}"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / f"step_{step}" / "COMPLETE").touch()
        (folder / "latest.new").write_text(str(step))
        (folder / "latest.new").replace(folder / "latest")


def load(accelerator: Accelerator, folder: Path) -> int:
    """Take up the newest checkpoint; the step that it was written at, 0 without one."""
    accelerator.wait_for_everyone()
    if not (folder / "latest").is_file():
        return 0
    step = int((folder / "latest").read_text())
    accelerator.load_state(str(folder / f"step_{step}"))
    accelerator.print(f"resumed at step {step}", flush=True)
    return step


def main() -> None:
    """Train: what is divided, in which precision and how often is accumulated comes from the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch-size", type=int, default=32, help="Samples per worker and pass.")
    parser.add_argument("--save-every", type=int, default=20, help="Steps between checkpoints.")
    here = Path(os.environ.get("DTCTL_SNAPSHOT_DIR", "checkpoints"))
    parser.add_argument("--checkpoints", type=Path, default=here, help="A folder that all nodes see.")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # on CPUs it would not look for other workers
    set_seed(0)
    inputs = torch.linspace(-3, 3, 2048).unsqueeze(1)
    loader = DataLoader(TensorDataset(inputs, torch.sin(inputs)), batch_size=options.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = load(accelerator, options.checkpoints)
    first_epoch, passed = divmod(step, len(loader))
    for epoch in range(first_epoch, options.epochs):
        loader.set_epoch(epoch)
        batches = skip_first_batches(loader, passed) if epoch == first_epoch and passed else loader
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step % options.save_every == 0:
                save(accelerator, options.checkpoints, step)
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(f"epoch {epoch + 1}/{options.epochs}  step {step}  loss {mean:.5f}", flush=True)
    # The model goes before the group that it talks through, or gloo now and then ends a worker at its exit.
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()


if __name__ == "__main__":
    main()
