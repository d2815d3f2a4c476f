"""A program that saves and resumes as common frameworks do; its arguments are a layout, steps, and seconds of a step.

Hugging Face's and Lightning's layouts are written by the same calls of torch, in the order of files in which their
trainers write them. A worker prints SAVED, and RESUMED with its rank, its step and a digest of what it has loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

LAYOUT, LAST, HALT, EVERY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
SLEEP_S, SIZE = float(sys.argv[5]), int(os.environ.get("SIZE", "20000"))
RANK, WORLD, ATTEMPT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["DTCTL_ATTEMPT"])
FOLDER = Path("checkpoints")


def state(step: int, part: int = -1) -> dict[str, torch.Tensor]:
    """What is saved at a step: by all workers, or of one."""
    return {"w": torch.full((SIZE,), float(step * 100 + part + 1)), "step": torch.tensor(step)}


def digest(loaded: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(loaded["w"].numpy().tobytes()).hexdigest()[:8]


def numbered(pattern: str) -> list[int]:
    """Steps of names in the folder, the newest last."""
    found = [
        re.fullmatch(pattern, name) for name in ([path.name for path in FOLDER.iterdir()] if FOLDER.is_dir() else ())
    ]
    return sorted(int(each[1]) for each in found if each)


def save(step: int) -> None:
    FOLDER.mkdir(exist_ok=True)
    if LAYOUT == "rank0":
        if RANK == 0:
            torch.save(state(step), FOLDER / f"step-{step}.pt")
    elif LAYOUT == "ranks":
        (FOLDER / f"step-{step}").mkdir(exist_ok=True)
        torch.save(state(step, RANK), FOLDER / f"step-{step}" / f"rank-{RANK}.pt")
    elif LAYOUT == "dcp":
        dcp.save({f"part{RANK}": state(step, RANK), "all": state(step)}, checkpoint_id=FOLDER / f"step-{step}")
    elif LAYOUT == "hf":
        folder = FOLDER / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        if RANK == 0:
            torch.save(state(step), folder / "pytorch_model.bin")
            torch.save({"lr": 0.1}, folder / "training_args.bin")
            torch.save(state(step), folder / "optimizer.pt")
        torch.save(state(step, RANK), folder / f"rng_state_{RANK}.pth")
        if RANK == 0:
            dist.barrier()
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        else:
            dist.barrier()
    elif LAYOUT == "lightning":
        if RANK == 0:
            torch.save({"state_dict": state(step), "global_step": step}, FOLDER / f"epoch={step // 8}-step={step}.ckpt")
    elif LAYOUT == "nanochat":
        folder = FOLDER / "d12"
        folder.mkdir(exist_ok=True)
        if RANK == 0:
            torch.save(state(step), folder / f"model_{step:06d}.pt")
            (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step}))
        torch.save(state(step, RANK), folder / f"optim_{step:06d}_rank{RANK}.pt")
    dist.barrier()
    print(f"SAVED {step}", flush=True)


def load() -> tuple[int, str]:
    """Newest step and a digest of what was loaded, by the files that this worker's node has; 0 without any."""
    folder = FOLDER
    if LAYOUT == "rank0" and (steps := numbered(r"step-(\d+)\.pt")):
        return steps[-1], digest(torch.load(folder / f"step-{steps[-1]}.pt"))
    if LAYOUT == "ranks" and (steps := numbered(r"step-(\d+)")):
        return steps[-1], digest(torch.load(folder / f"step-{steps[-1]}" / f"rank-{RANK}.pt"))
    if LAYOUT == "dcp" and (steps := numbered(r"step-(\d+)")):
        loaded = {f"part{RANK}": state(0, RANK), "all": state(0)}
        dcp.load(loaded, checkpoint_id=folder / f"step-{steps[-1]}")
        return steps[-1], digest(loaded[f"part{RANK}"])
    if LAYOUT == "hf" and (steps := numbered(r"checkpoint-(\d+)")):
        newest = folder / f"checkpoint-{steps[-1]}"
        assert json.loads((newest / "trainer_state.json").read_text())["global_step"] == steps[-1]
        torch.load(newest / "pytorch_model.bin")
        return steps[-1], digest(torch.load(newest / f"rng_state_{RANK}.pth"))
    if LAYOUT == "lightning" and (steps := numbered(r"epoch=\d+-step=(\d+)\.ckpt")):
        (path,) = folder.glob(f"epoch=*-step={steps[-1]}.ckpt")
        return steps[-1], digest(torch.load(path)["state_dict"])
    if LAYOUT == "nanochat" and (folder / "d12").is_dir():
        steps = sorted(int(path.stem[6:]) for path in (folder / "d12").glob("model_*.pt"))
        torch.load(folder / "d12" / f"model_{steps[-1]:06d}.pt")
        return steps[-1], digest(torch.load(folder / "d12" / f"optim_{steps[-1]:06d}_rank{RANK}.pt"))
    return 0, "-"


dist.init_process_group("gloo")
begun, loaded = load()
print(f"RESUMED rank={RANK} step={begun} digest={loaded}", flush=True)
last = min(LAST, begun + 2) if ATTEMPT > 0 else LAST
for step in range(begun + 1, last + 1):
    time.sleep(SLEEP_S)
    dist.barrier()
    if step % EVERY == 0:
        save(step)
    if step == HALT and ATTEMPT == 0:
        print("HALTED", flush=True)
        time.sleep(1000)
dist.destroy_process_group()
