"""Train a small GPT with experts: `python train.py`, torchrun, or `dtctl launch`; it resumes from its snapshots."""

from __future__ import annotations

from typing import Any

import data
import torch
from model import GPT, GPTConfig
from torch import nn

from dtctl.runtime import Outcome, TokenFile, TrainConfig, Trainer, Worker, build, run

# What holds unless dtctl.yaml or the command line (--train.lr=1e-3) says otherwise.
DEFAULTS: dict[str, Any] = {
    "micro_batch": 8,
    "clip_norm": 1.0,
    "lr": 3e-3,
    "min_lr": 3e-4,
    "warmup_steps": 100,
    "weight_decay": 0.1,
    "steps": 600,
    "eval_every": 200,
    "snapshot": {"every_steps": 200},
}


def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of every token, [B, T]."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")


def train(config: TrainConfig, worker: Worker) -> Outcome:
    """What each worker does."""
    shape = build(GPTConfig, config.model, at="train.model", where="the spec or the command line")
    worker.once_per_node(lambda: data.prepare(data.folder()))
    trainer = Trainer(
        config,
        worker,
        GPT(shape),
        lambda model, batch: losses(model, batch).mean(),
        TokenFile(data.folder() / "train.bin", context=shape.context),
        validation=TokenFile(data.folder() / "validation.bin", context=shape.context),
        score=lambda model, batch: {"loss": losses(model, batch).mean(1)},
    )
    outcome = trainer.run()
    if outcome is Outcome.FINISHED:
        weights = trainer.full_weights()  # whole on rank 0, however they were spread over the workers
        if worker.is_first:
            whole = GPT(shape)
            whole.load_state_dict(weights)
            print("\n" + whole.write("def ", 400).expandtabs(4) + "\n", flush=True)
    return outcome


if __name__ == "__main__":
    raise SystemExit(run(train, defaults=DEFAULTS))
