"""One training loop in one fresh process, for benchmarks/loop.py: `loop_step.py NAME SIZE STEPS`; answers in JSON.

Every loop does the same work: the same model, batches, AdamW with one kernel, no clipping, no logging, no snapshots
during the steps that count. Times are medians over blocks of steps.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLES = 4096
BLOCK = 25
"""Steps that are timed together."""


def model(size: str) -> Any:
    """A network whose step takes some 0.3 ms (tiny), 5 ms (small) or 60 ms (large, by its batch) on one core."""
    from torch import nn

    depth, inside = {"tiny": (1, 32), "small": (3, 448), "large": (3, 448)}[size]
    layers: list[nn.Module] = [nn.Linear(8, inside), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(inside, inside), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(inside, 1))


class Clock:
    """Told of every step; knows the time of a step, blocks of them at a time, after one block that does not count."""

    def __init__(self) -> None:
        self.steps = 0
        self.first_s = 0.0
        self.marks: list[float] = []

    def step(self) -> None:
        """A step is done."""
        if self.steps == 0:
            self.first_s = time.time()
        self.steps += 1
        if self.steps % BLOCK == 0:
            self.marks.append(time.perf_counter())

    def answer(self) -> dict[str, float]:
        """Microseconds per step, and when the first one was done."""
        blocks = [(after - before) / BLOCK * 1e6 for before, after in zip(self.marks, self.marks[1:], strict=False)]
        return {"us": statistics.median(blocks) if blocks else 0.0, "first_step_at": self.first_s}


def tensors(size: str) -> tuple[Any, Any, int]:
    """Inputs, targets, samples per step."""
    import torch

    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=source)
    return inputs, inputs.sum(1, keepdim=True), {"tiny": 4, "small": 64, "large": 1024}[size]


def bare(size: str, steps: int, clock: Clock) -> None:
    """What one writes by hand."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    inputs, targets, count = tensors(size)
    network = model(size)
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        torch.distributed.init_process_group("gloo")
        network = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    order = torch.randperm(SAMPLES)
    for step in range(steps):
        start = step * count % SAMPLES
        indices = order[start : start + count]
        batch = inputs[indices], targets[indices]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        clock.step()
    if distributed:
        torch.distributed.destroy_process_group()
        for _ in range(10):
            time.sleep(0.005)  # gloo's threads abort the process if the interpreter ends at once


def elastic(size: str, steps: int, clock: Clock) -> None:
    """The Trainer with `exact: elastic`, two micro batches of half the size for each worker, as in `dtctl halves`."""
    dtctl(size, steps, clock, halves=True, exact="elastic")


def halves(size: str, steps: int, clock: Clock) -> None:
    """The Trainer with two micro batches of half the size for each worker."""
    dtctl(size, steps, clock, halves=True)


def dtctl(size: str, steps: int, clock: Clock, *, halves: bool = False, exact: str | None = None) -> None:
    """The Trainer."""
    from torch import nn

    from dtctl.runtime import TensorData, Trainer, load, start

    inputs, targets, count = tensors(size)
    folder = Path(tempfile.mkdtemp())
    settings = {"steps": steps, "micro_batch": count, "log_every": 10 * BLOCK, "snapshot": {"dir": str(folder)}}
    if halves:
        workers = int(os.environ.get("WORLD_SIZE", "1"))
        settings |= {"micro_batch": count // 2, "global_batch": count * workers}
    if exact:
        settings["exact"] = exact
    os.environ["DTCTL_METRICS"] = str(folder / "metrics.jsonl")
    with start() as worker:
        config = load(settings, argv=[])
        loss = lambda network, batch: nn.functional.mse_loss(network(batch[0]), batch[1])  # noqa: E731
        trainer = Trainer(config, worker, model(size), loss, TensorData(inputs, targets))
        trainer.optimizer.register_step_post_hook(lambda *_: clock.step())
        trainer.run()


def fabric(size: str, steps: int, clock: Clock) -> None:
    """Lightning Fabric."""
    import torch
    from lightning.fabric import Fabric
    from torch import nn

    lightning = Fabric(accelerator="cpu", devices=1)
    lightning.launch()
    inputs, targets, count = tensors(size)
    network = model(size)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    network, optimizer = lightning.setup(network, optimizer)
    loader = lightning.setup_dataloaders(_loader(inputs, targets, count))
    for batch in _endless(loader, steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(batch[0]), batch[1])
        lightning.backward(loss)
        optimizer.step()
        clock.step()


def accelerate(size: str, steps: int, clock: Clock) -> None:
    """Hugging Face accelerate."""
    import torch
    from accelerate import Accelerator
    from torch import nn

    helper = Accelerator(cpu=True)
    inputs, targets, count = tensors(size)
    network = model(size)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    network, optimizer = helper.prepare(network, optimizer)  # its loaders cost more; batches are had as in `bare`
    order = torch.randperm(SAMPLES)
    for step in range(steps):
        start = step * count % SAMPLES
        indices = order[start : start + count]
        with helper.accumulate(network):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(network(inputs[indices]), targets[indices])
            helper.backward(loss)
            optimizer.step()
        clock.step()


def lightning(size: str, steps: int, clock: Clock) -> None:
    """Lightning's Trainer, with everything off that can be off."""
    import torch
    from lightning import LightningModule
    from lightning import Trainer as Lightning
    from torch import nn

    inputs, targets, count = tensors(size)

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = model(size)

        def training_step(self, batch: Any, _index: int) -> Any:
            return nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.step()

    trainer = Lightning(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), _loader(inputs, targets, count))


def _loader(inputs: Any, targets: Any, count: int) -> Any:
    """The quickest road to batches that these frameworks take: whole batches, nothing to put together."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

    data = TensorDataset(inputs, targets)
    return DataLoader(data, sampler=BatchSampler(RandomSampler(data), count, drop_last=True), batch_size=None)


def _endless(loader: Any, steps: int) -> Any:
    done = 0
    while True:
        for batch in loader:
            if done == steps:
                return
            done += 1
            yield batch


LOOPS: dict[str, Callable[[str, int, Clock], None]] = {
    "bare": bare,
    "dtctl": dtctl,
    "halves": halves,
    "elastic": elastic,
    "fabric": fabric,
    "accelerate": accelerate,
    "lightning": lightning,
}


def main() -> None:
    """Run one loop and print what it took."""
    name, size, steps = sys.argv[1:4]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)
    clock = Clock()
    LOOPS[name](size, int(steps), clock)
    if os.environ.get("RANK", "0") == "0":
        print("\n" + json.dumps(clock.answer()), flush=True)


if __name__ == "__main__":
    main()
