"""Who goes on as if nothing had happened: killed in mid-epoch, resumed in a fresh process, compared bit by bit.

    python benchmarks/resume.py        as many programs as are installed; two minutes

Each trains one network on one data set for 40 steps, with AdamW and shuffling, dropout 0 or 0.2, on one CPU.
Three processes for each: one that is left alone, one that kills itself with -9 in step 30, and one that goes on from
what the second had saved after step 20. Compared are all weights after step 40; two runs that are left alone must be
the same, else nothing can be said. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAVED, KILLED, STEPS, BATCH, SAMPLES = 20, 30, 40, 4, 240  # 60 batches an epoch: all in the first


def network(dropout: float) -> nn.Module:
    """A small network with dropout."""
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 1))


def data() -> TensorDataset:
    """Points of a plane."""
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def digest(model: nn.Module) -> str:
    """Of all weights."""
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(name.encode() + tensor.numpy().tobytes())
    return state.hexdigest()


def die_if(step: int, *, doomed: bool) -> None:
    """End as by a power failure, in the middle of the epoch."""
    if doomed and step == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


def dtctl(dropout: float, doomed: bool) -> nn.Module:
    """The Trainer; it resumes on its own."""
    from dtctl.runtime import TensorData, TrainConfig, Trainer, build
    from dtctl.runtime.distributed.worker import resolve_worker_from_env
    from dtctl.runtime.randomness import seed_all

    seed_all(0)
    settings = {
        "micro_batch": BATCH,
        "steps": STEPS,
        "lr": 1e-3,
        "log_every": STEPS,
        "snapshot": {"every_steps": SAVED},
    }
    model, points = network(dropout), data().tensors

    def loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if trainer.step == KILLED - 1:
            trainer.saver.wait()
        die_if(trainer.step + 1, doomed=doomed)
        return nn.functional.mse_loss(module(batch[0]), batch[1])

    config = build(TrainConfig, settings, at="train", where="benchmark")
    trainer = Trainer(config, resolve_worker_from_env({}), model, loss, TensorData(*points))
    trainer.run()
    return model


def _lightning(dropout: float, doomed: bool, loader_class: Callable[..., DataLoader]) -> nn.Module:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(dropout)

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
            die_if(self.global_step + 1, doomed=doomed)
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    lightning.seed_everything(0, verbose=False)
    module = Module()
    save = ModelCheckpoint(dirpath="saved", filename="at-{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[save],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        deterministic=True,
    )
    found = sorted(Path("saved").glob("*.ckpt"))
    trainer.fit(module, loader_class(data(), batch_size=BATCH, shuffle=True), ckpt_path=found[-1] if found else None)
    return module.net


def lightning_plain(dropout: float, doomed: bool) -> nn.Module:
    """Lightning's Trainer and ModelCheckpoint, torch's DataLoader."""
    return _lightning(dropout, doomed, DataLoader)


def lightning_stateful(dropout: float, doomed: bool) -> nn.Module:
    """The same with torchdata's StatefulDataLoader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return _lightning(dropout, doomed, StatefulDataLoader)


def _accelerate(dropout: float, doomed: bool, *, stateful: bool) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=True),
    )
    model = network(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step, batches = 0, loader
    if Path("saved").is_dir():
        accelerator.load_state("saved")
        step = SAVED
        if not stateful:
            batches = accelerator.skip_first_batches(loader, SAVED)
    for inputs, targets in batches:
        die_if(step + 1, doomed=doomed)
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == SAVED:
            accelerator.save_state("saved")
        if step == STEPS:
            break
    return accelerator.unwrap_model(model)


def accelerate_skipping(dropout: float, doomed: bool) -> nn.Module:
    """Accelerate with save_state, load_state and skip_first_batches."""
    return _accelerate(dropout, doomed, stateful=False)


def accelerate_stateful(dropout: float, doomed: bool) -> nn.Module:
    """Accelerate with a stateful loader."""
    return _accelerate(dropout, doomed, stateful=True)


PROGRAMS: dict[str, tuple[Callable[[float, bool], nn.Module], tuple[str, ...]]] = {
    "dtctl": (dtctl, ("torch",)),
    "Lightning": (lightning_plain, ("lightning",)),
    "Lightning, StatefulDataLoader": (lightning_stateful, ("lightning", "torchdata")),
    "Accelerate, skip_first_batches": (accelerate_skipping, ("accelerate",)),
    "Accelerate, stateful loader": (accelerate_stateful, ("accelerate", "torchdata")),
}


def child(name: str, dropout: float, folder: Path, *, doomed: bool) -> str | None:
    """One process; the digest of its weights at the end, None if it was killed."""
    argv = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--dropout", str(dropout)]
    done = subprocess.run(
        [*argv, *(["--doomed"] if doomed else [])],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    if doomed and done.returncode == -signal.SIGKILL:
        return None
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return done.stdout.split()[-1]


def versions(packages: tuple[str, ...]) -> dict[str, str] | None:
    """Of packages; None if one is not installed."""
    try:
        return {package: importlib.metadata.version(package) for package in packages}
    except importlib.metadata.PackageNotFoundError:
        return None


def compare(name: str, dropout: float) -> dict[str, object]:
    """Left alone, twice, and killed and resumed."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, word) for word in ("one", "two", "killed")]
        for folder in folders:
            folder.mkdir()
        straight = [child(name, dropout, folder, doomed=False) for folder in folders[:2]]
        assert child(name, dropout, folders[2], doomed=True) is None
        resumed = child(name, dropout, folders[2], doomed=False)
    return {"straight": straight[0] == straight[1], "resumed": resumed == straight[0]}


def main() -> None:
    """Train, compare, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--dropout", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--doomed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        torch.use_deterministic_algorithms(True)
        print(digest(PROGRAMS[options.child][0](options.dropout, options.doomed)))
        return
    from machine import keep

    kept: dict[str, object] = {"date": time.strftime("%Y-%m-%d %H:%M"), "killed_in_step": KILLED, "saved_after": SAVED}
    print(f"{'':34}{'dropout 0':>12}{'dropout 0.2':>14}")
    for name, (_, packages) in PROGRAMS.items():
        found = versions((*packages, "torch"))
        if found is None:
            print(f"{name:34}{'not installed':>26}")
            continue
        rows = {str(dropout): compare(name, dropout) for dropout in (0.0, 0.2)}
        kept[name] = {"versions": found, "dropout": rows}
        words = ["identical" if row["resumed"] else "DIFFERS" for row in rows.values()]
        words = [word if row["straight"] else "unrepeatable" for word, row in zip(words, rows.values(), strict=True)]
        print(f"{name:34}{words[0]:>12}{words[1]:>14}", flush=True)
    keep("resume", kept)


if __name__ == "__main__":
    main()
