"""What a step waits for, which batches reach the device, signals in the middle of training, and its speed."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_checks import exchange
from benchmarks.gpu_checks.ground import (
    ROOT,
    Ground,
    Point,
    group_of_one,
    judged,
    model_of,
    shown,
    skipped,
    train,
)
from benchmarks.gpu_checks.stand_in import DEVICE, stand_in, steps_of
from dtctl.runtime import Outcome, Trainer, start
from dtctl.runtime.data_loading import datasets

STRATEGIES: Mapping[str, Any] = {"single": None, "ddp": exchange.ddp, "fsdp": exchange.fsdp, "hsdp": exchange.hsdp}
SETTINGS = {"steps": 20, "log_every": 10, "clip_norm": 1.0}


class Enough(Exception):
    """Enough steps were made."""


def synchronizations(on: Ground) -> Iterator[Point]:
    """Steps with clipping, between two lines of metrics: nothing waits for the device."""
    with start() as alone:
        for name, make in STRATEGIES.items():
            if name == "single":
                found = _waits(on, alone, name, make)
            else:
                with group_of_one(on) as worker:
                    found = _waits(on, worker, name, make)
            how = "torch's sync debug mode" if on.gpu else "stand-in tensors"
            yield judged(f"{name}, by {how}", "none", found or "none", ok=not found)


def _waits(on: Ground, worker: Any, name: str, make: Any) -> str:
    """What waited; on a GPU the first that torch has found."""
    if not on.gpu:
        model = model_of(on.size())
        there = dataclasses.replace(worker, device=DEVICE)
        with stand_in(model) as waits:

            def run(after: Callable[[int], None]) -> None:
                train(on, there, name, SETTINGS, model=lambda: model, make=make, before=lambda it: _hear(it, after))

            return ", ".join(f"{count} x {what}" for what, count in steps_of(run, waits, first=1, last=5).items())

    def after(step: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if 12 <= step < 18 else "default")
        if step == 18:
            raise Enough

    try:
        train(on, worker, name, SETTINGS, make=make, before=lambda trainer: _hear(trainer, after))
    except Enough:
        return ""
    except RuntimeError as exc:
        torch.cuda.set_sync_debug_mode("default")
        trace, place = exc.__traceback__, ""
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            place = f"{Path(file).name}:{trace.tb_lineno}" if "dtctl" in file else place
            trace = trace.tb_next
        return f"{str(exc).partition(chr(10))[0]} at {place}"
    return "the training has ended before it was looked at"


def _hear(trainer: Trainer, after: Callable[[int], None]) -> None:
    step = trainer.training.report.step

    def done(number: int) -> None:
        step(number)
        after(number)

    trainer.training.report.step = done  # type: ignore[method-assign]


Pair = collections.namedtuple("Pair", ["inputs", "targets"])  # noqa: PYI024 - as users write them


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """Like Hugging Face's BatchEncoding."""


@dataclasses.dataclass
class Sample:
    """A batch as a dataclass."""

    inputs: torch.Tensor
    name: str


def batches(on: Ground) -> Iterator[Point]:
    """Batches of every class reach the device, from page-locked memory, read by the loop, a thread or processes."""
    device = on.device if on.gpu else torch.device("meta")  # which shows what is moved
    ones = torch.ones(4, 2)
    for batch in ((ones, ones), {"inputs": ones}, Pair(ones, ones), Encoding(inputs=ones), Sample(ones, "a"), [ones]):
        locked = datasets.pin_batch_tensors(batch) if on.gpu else batch
        moved = datasets.move_to_device(locked, device)
        tensors = _tensors(moved)
        there = bool(tensors) and all(tensor.device.type == device.type for tensor in tensors)
        held = not on.gpu or all(tensor.is_pinned() for tensor in _tensors(locked))
        same = type(moved) is type(batch)
        figure = f"{len(tensors)} tensors moved, page-locked {held}, class kept {same}"
        yield judged(type(batch).__name__, "moved, page-locked, of its class", figure, ok=there and held and same)
    for workers in (0, "thread", 2):
        seen: list[str] = []

        def look(model: Any, batch: Any, seen: list[str] = seen) -> Any:
            seen.append(batch[0].device.type)
            return exchange.loss(model, batch)

        with start() as worker:
            train(on, worker, f"feed-{workers}", {"steps": 3, "data_workers": workers}, loss=look)
        right = set(seen) == {on.device.type}
        yield judged(f"data_workers {workers}", f"on {on.device.type}", ", ".join({*seen}), ok=right)


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in _tensors(value)]
    if isinstance(batch, tuple | list):
        return [tensor for value in batch for tensor in _tensors(value)]
    if dataclasses.is_dataclass(batch):
        return _tensors([getattr(batch, field.name) for field in dataclasses.fields(batch)])
    return []


def signals(on: Ground) -> Iterator[Point]:
    """SIGUSR2 asks for a profile, SIGTERM for a snapshot and an end."""
    os.environ["DTCTL_RUN_DIR"] = str(on.folder)
    with start() as worker:

        def ask(trainer: Trainer) -> None:
            def after(step: int) -> None:
                if step == 4:
                    signal.raise_signal(signal.SIGUSR2)
                if step == 12:
                    signal.raise_signal(signal.SIGTERM)

            _hear(trainer, after)

        settings = {"profile": {"memory": True}, "log_every": 5}
        _, trainer, outcome = train(on, worker, "signalled", settings, before=ask)
        ended = f"{outcome.name} after step {trainer.step}, exit code {outcome.exit_code}"
        stopped = outcome is Outcome.STOPPED and outcome.exit_code == 75 and trainer.step < trainer.steps
        yield judged("SIGTERM in the middle of steps", "stopped, exit code 75", ended, ok=stopped)
        there = (on.folder / "signalled" / "snapshots").glob("step-*")
        yield judged("its snapshot", "of the last step", names := sorted(one.name for one in there), ok=bool(names))
    traces = list((on.folder / "profile").glob("trace-*.json"))
    events = json.loads(traces[0].read_text())["traceEvents"] if traces else []
    kinds = collections.Counter(event.get("cat") for event in events)
    wanted = "kernel" if on.gpu else "cpu_op"
    yield judged("SIGUSR2: the trace", f"has events of kind {wanted}", kinds[wanted], ok=kinds[wanted] > 0)
    if on.gpu:
        records = list((on.folder / "profile").glob("memory-*.pickle"))
        yield judged("SIGUSR2: the record of memory", "a file", len(records), ok=bool(records))


def beside_by_hand(on: Ground) -> Iterator[Point]:
    """The Trainer beside a loop written by hand (gpu_loops.py): tokens per second, and peak memory."""
    size, setting = ("124M", "bf16") if on.gpu else ("tiny", "bf16")
    found: dict[str, list[dict[str, float]]] = {"bare": [], "dtctl": []}
    for _ in range(2 if on.gpu else 1):
        for name, rows in found.items():
            argv = [sys.executable, "-m", "benchmarks.gpu_loops", "--one", name, "--sizes", size]
            folder = on.folder / f"{name}-{len(rows)}"
            folder.mkdir()
            done = subprocess.run(
                [*argv, "--settings", setting, "--device", on.device.type], cwd=folder, capture_output=True, text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=120,
            )  # fmt: skip
            rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
    pairs = list(zip(found["dtctl"], found["bare"], strict=True))
    ratio = sorted(ours["tokens_per_s"] / bare["tokens_per_s"] for ours, bare in pairs)[len(pairs) // 2]
    tokens = " ".join(f"{ours['tokens_per_s']:,.0f}/{bare['tokens_per_s']:,.0f}" for ours, bare in pairs)
    if not on.gpu:
        yield shown("tokens per second beside a loop by hand", f"{ratio:.2f} ({tokens})")
        yield skipped("the ratio, MFU and memory")
        return
    figure = f"{ratio:.3f} ({tokens} tokens/s, MFU {pairs[0][0]['mfu']:.1%})"
    yield judged("tokens per second beside a loop by hand", "0.98 or more", figure, ok=ratio >= 0.98)
    ours, bare = (max(pair[at]["memory_gib"] for pair in pairs) for at in (0, 1))
    figure = f"{ours:.2f} and {bare:.2f} GiB"
    yield judged("peak memory beside it", "within 5%", figure, ok=abs(ours / bare - 1) <= 0.05)
