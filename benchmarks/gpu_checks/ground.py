"""What the checks stand on: the device, sizes that fit it, a small GPT, trainings of it, and processes beside this one.

Two hooks let one GPU show what needs several workers; both replace what a worker finds out about itself, and no key of
the spec leads there: `group_of_one` gives a single worker a process group, `on_one_gpu` lets all workers of a node
share the first GPU, over gloo, since NCCL refuses two ranks on one device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.gpu_loops import GPT, Size, loss, tokens_of
from dtctl import names
from dtctl.runtime import Outcome, TensorData, Trainer, engine, load, start
from dtctl.runtime.distributed import process_group
from dtctl.runtime.distributed.worker import Worker, resolve_worker_from_env
from dtctl.runtime.strategies import Strategy
from dtctl.train.config import TrainConfig

Verdict = Literal["ok", "failed", "shown", "skipped"]
ROOT = Path(__file__).resolve().parents[2]
NEEDS_GPU = "needs a GPU"


@dataclass(frozen=True, slots=True)
class Point:
    """One expectation, and what was found."""

    what: str
    expected: str
    found: str
    verdict: Verdict
    """`shown`: a figure that is not judged; `skipped`: `found` says why."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Where checks run."""

    device: torch.device
    folder: Path
    """Empty, for this check alone."""

    @property
    def gpu(self) -> bool:
        """Whether there is a GPU; else sizes are tiny, and times and bytes say nothing."""
        return self.device.type == "cuda"

    def sync(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def size(self, *, dropout: float = 0.0) -> Size:
        """A GPT that trains 30 steps in seconds."""
        if self.gpu:
            return Size(
                layers=4, heads=8, embed=512, context=256, vocabulary=1024, micro_batch=8, accumulate=1, steps=20,
                dropout=dropout,
            )  # fmt: skip
        return Size(
            layers=2, heads=2, embed=32, context=32, vocabulary=64, micro_batch=4, accumulate=1, steps=20,
            dropout=dropout,
        )  # fmt: skip


Check = Callable[[Ground], Iterator[Point]]
Make = Callable[[TrainConfig, Worker, nn.Module], Strategy]


def judged(what: str, expected: str, found: object, *, ok: bool) -> Point:
    """A point that holds or does not."""
    return Point(what, expected, str(found), "ok" if ok else "failed")


def shown(what: str, found: object) -> Point:
    """A figure for the record."""
    return Point(what, "shown, not judged", str(found), "shown")


def skipped(what: str, why: str = NEEDS_GPU) -> Point:
    """A point that cannot be tried here."""
    return Point(what, "", why, "skipped")


def near(what: str, values: Sequence[float], others: Sequence[float], limit: float) -> Point:
    """Whether two courses of a loss differ by no more than a share of it."""
    pairs = list(zip(values, others, strict=False))
    off = max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=float("inf"))
    alike = len(values) == len(others) and bool(pairs)
    return judged(what, f"within {limit:g}", f"{off:.2g} over {len(pairs)} steps", ok=alike and off <= limit)


def raised(what: str, action: Callable[[], object], kind: type[BaseException], words: str = "") -> Point:
    """Whether something is refused."""
    try:
        found = repr(action())
    except kind as exc:
        return judged(what, kind.__name__, str(exc).partition("\n")[0], ok=words in str(exc))
    return judged(what, kind.__name__, found, ok=False)


def free_port() -> int:
    """A port of this machine's own that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _as_worker(change: Callable[[Worker], Worker], environ: Mapping[str, str]) -> Iterator[None]:
    """Let `start` find another worker than the variables alone say."""
    before, kept = process_group.resolve_worker_from_env, dict(os.environ)
    os.environ.update(environ)
    process_group.resolve_worker_from_env = lambda variables: change(resolve_worker_from_env(variables))
    try:
        yield
    finally:
        process_group.resolve_worker_from_env = before
        os.environ.clear()
        os.environ.update(kept)


@contextmanager
def group_of_one(on: Ground, **options: Any) -> Iterator[Worker]:
    """A single worker that has a process group all the same; `options` are those of `start`."""
    backend = "cpu:gloo,cuda:nccl" if on.gpu else "gloo"
    variables = {
        names.RANK: "0", names.LOCAL_RANK: "0", names.WORLD_SIZE: "1", names.LOCAL_WORLD_SIZE: "1",
        names.MASTER_ADDR: "127.0.0.1", names.MASTER_PORT: str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    hook = _as_worker(lambda worker: dataclasses.replace(worker, backend=backend), variables)
    with hook, start(**options) as worker:
        yield worker


@contextmanager
def on_one_gpu(on: Ground, **options: Any) -> Iterator[Worker]:
    """One of several workers of this machine, all of which share one device; `options` are those of `start`.

    The variables must say which: see `together`.
    """
    change: Callable[[Worker], Worker] = lambda worker: dataclasses.replace(  # noqa: E731
        worker, device=on.device, backend="gloo"
    )
    shared = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]} if on.gpu else {}
    with _as_worker(change, shared), start(**options) as worker:
        yield worker


def together(on: Ground, part: str, count: int, *, limit_s: float, **given: object) -> list[dict[str, Any]]:
    """Run a part of a check in some workers of this machine; what each answers.

    Args:
        on: where.
        part: `module.name`, of a function of the ground and what is given.
        count: workers; one has no process group.
        limit_s: after which they are ended, and the check fails.
        given: to the function; JSON.
    """
    port, running = free_port(), []
    for rank in range(count):
        folder = on.folder / f"{part}-{count}-{rank}"
        folder.mkdir(exist_ok=True)
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        if count > 1:
            environ |= {
                names.RANK: str(rank), names.LOCAL_RANK: str(rank), names.WORLD_SIZE: str(count),
                names.LOCAL_WORLD_SIZE: str(count), names.MASTER_ADDR: "127.0.0.1", names.MASTER_PORT: str(port),
            }  # fmt: skip
        argv = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--given", json.dumps(given)]
        argv += [] if on.gpu else ["--cpu"]
        running.append(
            subprocess.Popen(argv, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        said = [process.communicate(timeout=limit_s)[0] for process in running]
    except subprocess.TimeoutExpired as exc:
        raise RuntimeError(f"{part} with {count} workers has not ended after {limit_s:g} s") from exc
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"{part} ended with {process.returncode}: {text[-600:]}")
    return [json.loads(text.strip().splitlines()[-1]) for text in said]


def model_of(size: Size) -> nn.Module:
    """The GPT of a size, with the same weights every time."""
    torch.manual_seed(0)
    return GPT(size)


def train(
    on: Ground,
    worker: Worker,
    name: str,
    settings: Mapping[str, Any] | None = None,
    *,
    size: Size | None = None,
    model: Callable[[], nn.Module] | None = None,
    loss: Callable[[nn.Module, Any], Any] = loss,
    make: Make | None = None,
    before: Callable[[Trainer], object] = lambda _: None,
) -> tuple[list[float], Trainer, Outcome]:
    """Train in a folder of that name; the losses of this process's steps, the trainer, and how it ended.

    Args:
        on: where.
        worker: this worker.
        name: of the training; one that is there already goes on.
        settings: of `train:`.
        size: of the GPT.
        model: makes another one.
        loss: of a batch.
        make: the strategy, instead of the one that the settings mean.
        before: is given the trainer before it runs.
    """
    size = size or on.size()
    folder = on.folder / name
    folder.mkdir(exist_ok=True)
    metrics = folder / f"metrics-{len(list(folder.iterdir()))}.jsonl"
    os.environ[names.METRICS] = str(metrics)
    config = load(
        {
            "steps": size.steps, "micro_batch": size.micro_batch, "lr": 1e-3, "log_every": 1, "schedule": "constant",
            "snapshot": {"dir": str(folder / "snapshots")}, **(settings or {}),
        },
        argv=[], environ={},
    )  # fmt: skip
    chosen = engine.build_strategy
    if make is not None:
        engine.build_strategy = lambda config, worker, _degrees, _batch, model, _probe: make(config, worker, model)
    try:
        trainer = Trainer(config, worker, model() if model else model_of(size), loss, TensorData(*tokens_of(size)))
    finally:
        engine.build_strategy = chosen
    before(trainer)
    outcome = trainer.run()
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line)["loss"] for line in lines], trainer, outcome


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The model's whole state on the CPU; of a model that is not divided between processes."""
    found = trainer.full_weights()
    return {key: value.detach().cpu().clone() for key, value in found.items() if isinstance(value, torch.Tensor)}


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two states have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
