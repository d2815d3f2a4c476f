"""Fit a curve with Lightning; resumes from its own checkpoints. Needs nothing of dtctl."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Curve(lightning.LightningModule):
    """A small network and how it is trained."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """The loss of one batch."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.network(inputs), targets)

    def on_train_batch_end(self, outputs: dict[str, torch.Tensor], *_: object) -> None:
        """Say how far it is."""
        step = self.trainer.global_step
        if step % 20 == 0 and self.trainer.is_global_zero:
            print(f"step {step}/{self.trainer.max_steps}  loss {outputs['loss'].item():.5f}", flush=True)

    def on_train_start(self) -> None:
        """Say where it begins."""
        if self.trainer.global_step and self.trainer.is_global_zero:
            print(f"resumed at step {self.trainer.global_step}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    """Train on as many nodes and devices as the launcher says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--save-every", type=int, default=20, help="Steps between checkpoints.")
    here = Path(os.environ.get("DTCTL_SNAPSHOT_DIR", "checkpoints"))
    parser.add_argument("--checkpoints", type=Path, default=here, help="A folder that all nodes see.")
    options = parser.parse_args()

    lightning.seed_everything(0)
    inputs = torch.linspace(-3, 3, 2048).unsqueeze(1)
    workers, devices = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=devices,
        num_nodes=workers // devices,
        strategy="ddp" if workers > 1 else "auto",
        max_steps=options.steps,
        callbacks=[ModelCheckpoint(options.checkpoints, every_n_train_steps=options.save_every, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(inputs, torch.sin(inputs)), batch_size=32, shuffle=True)
    trainer.fit(Curve(options.lr), loader, ckpt_path="last")  # the newest one, or none


if __name__ == "__main__":
    main()
