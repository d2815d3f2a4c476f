"""Fit a curve with DeepSpeed; resumes from its own checkpoints. Needs nothing of dtctl."""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
from torch import nn


def arguments() -> argparse.Namespace:
    """As programs for DeepSpeed's launcher have them: --local_rank, and --deepspeed_config with a file or base64."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--save_every", type=int, default=20, help="Steps between checkpoints.")
    here = os.environ.get("DTCTL_SNAPSHOT_DIR", "checkpoints")
    parser.add_argument("--checkpoints", default=here, help="A folder that all nodes see.")
    return deepspeed.add_config_arguments(parser).parse_args()


def batch(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of the curve: a function of the step and the rank."""
    source = torch.Generator().manual_seed(step * torch.distributed.get_world_size() + torch.distributed.get_rank())
    inputs = 6 * torch.rand(samples, 1, generator=source) - 3
    return inputs, torch.sin(inputs)


def main() -> None:
    """Train: ZeRO stage, batch, precision and clipping come from the configuration."""
    options = arguments()
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    engine, _, _, _ = deepspeed.initialize(
        args=options, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=options.lr)
    )
    path, state = engine.load_checkpoint(options.checkpoints)  # the newest one, as DeepSpeed's file `latest` says
    if path is not None and engine.global_rank == 0:
        print(f"resumed at step {state['step']}", flush=True)
    for step in range(0 if path is None else state["step"], options.steps):
        for part in range(engine.gradient_accumulation_steps()):
            number = step * engine.gradient_accumulation_steps() + part
            inputs, targets = (
                tensor.to(engine.device) for tensor in batch(number, engine.train_micro_batch_size_per_gpu())
            )
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}/{options.steps}  loss {loss.item():.5f}", flush=True)
        if (step + 1) % options.save_every == 0:
            engine.save_checkpoint(options.checkpoints, client_state={"step": step + 1})
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
