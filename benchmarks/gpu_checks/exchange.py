"""Process groups, strategies in a group of one beside a single worker, and lack of memory."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.gpu_checks.ground import (
    ROOT,
    Ground,
    Point,
    group_of_one,
    judged,
    near,
    on_one_gpu,
    shown,
    skipped,
    together,
    train,
)
from benchmarks.gpu_loops import loss
from dtctl.runtime import start
from dtctl.runtime.distributed import process_group
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.loop import Trainer
from dtctl.runtime.strategies import gradients, sharded, unused
from dtctl.runtime.strategies.ddp import Ddp
from dtctl.runtime.strategies.sharded import FullySharded
from dtctl.runtime.telemetry import flight
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees

STEPS = 5


class ShardedAlone(FullySharded):
    """Sharded over a mesh of one worker, which the Trainer spares itself."""

    def __init__(self, model: nn.Module, config: TrainConfig, worker: Worker, mesh: DeviceMesh) -> None:
        super().__init__(model, config, worker, Degrees(), mesh)  # which shards nothing
        self._turns = sharded.shard_model(model, config, worker, mesh, in_turns=True)
        self.present = unused.UsedParameters(model, [model], [name for name, _ in model.named_parameters()])
        sharded.keep_buffers_alike(model, mesh)
        self._wanted = gradients.list_trained_parameters(model)


def fsdp(config: TrainConfig, worker: Worker, model: nn.Module) -> FullySharded:
    """A strategy for `ground.train`: shards over a group of one."""
    return ShardedAlone(
        model, config, worker, device_mesh.init_device_mesh(worker.device.type, (1,), mesh_dim_names=("fsdp",))
    )


def hsdp(config: TrainConfig, worker: Worker, model: nn.Module) -> FullySharded:
    """Replicas of shards, one of each."""
    mesh = device_mesh.init_device_mesh(worker.device.type, (1, 1), mesh_dim_names=("dp", "fsdp"))
    return ShardedAlone(model, config, worker, mesh)


def ddp(config: TrainConfig, worker: Worker, model: nn.Module) -> Ddp:
    """A group of one that exchanges gradients with itself."""
    return Ddp(model, config.ddp, worker)


class Normed(nn.Module):
    """A network with BatchNorm behind an embedding; logits as those of the GPT."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(vocabulary, width), nn.BatchNorm1d(width)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [samples, tokens, vocabulary]."""
        return self.output(self.norm(self.tokens(tokens).transpose(1, 2)).transpose(1, 2))


def groups(on: Ground) -> Iterator[Point]:
    """A group of one: sums on both devices, meshes, every strategy beside a single worker, the record, the end."""
    settings = {"steps": STEPS}
    same = {"deterministic": on.gpu}  # else AdamW's first steps make much of kernels that add up in another order
    with start(**same) as worker:
        alone, _, _ = train(on, worker, "single", settings)
        halves, _, _ = train(on, worker, "single-bf16", {**settings, "precision": "bf16"})
    with group_of_one(on, **same) as worker:
        on_cpu, on_device = torch.arange(4.0), torch.arange(4.0, device=on.device)
        dist.all_reduce(on_cpu)
        dist.all_reduce(on_device)
        worker.barrier()
        sums = f"{on_cpu.tolist()} and {on_device.tolist()}"
        yield judged(
            "sums on the CPU and on the device", "both as they were", sums, ok=bool((on_cpu == on_device.cpu()).all())
        )
        for shape, axes in (((1, 1), ("dp", "fsdp")), ((1, 1, 1), ("dp", "fsdp", "tp"))):
            mesh = device_mesh.init_device_mesh(on.device.type, shape, mesh_dim_names=axes)
            one = torch.ones(1, device=on.device)
            dist.all_reduce(one, group=mesh[axes[-1]].get_group())
            yield judged(f"a sum over the last axis of a mesh {shape}", "1", one.item(), ok=one.item() == 1)
        for hook in ("none", "bf16", "fp16", "powersgd"):
            if hook == "fp16" and not on.gpu:
                yield skipped("ddp with hook fp16")
                continue
            losses, _, _ = train(on, worker, f"ddp-{hook}", {**settings, "ddp": {"comm_hook": hook}}, make=ddp)
            # A gradient that is rounded on its way differs from the first step on; AdamW's first steps are +-lr.
            yield near(f"ddp with hook {hook} beside a single worker", losses, alone, 1e-6 if hook == "none" else 2e-2)
        for name, make, changed, beside, limit in (
            ("fsdp", fsdp, {}, alone, 1e-6),
            ("hsdp of 1 x 1", hsdp, {}, alone, 1e-6),
            ("fsdp in bf16", fsdp, {"precision": "bf16"}, halves, 2e-2),
            ("fsdp gathered in bf16", fsdp, {"precision": "bf16", "fsdp": {"param_dtype": "bf16"}}, halves, 2e-2),
        ):
            losses, _, _ = train(on, worker, name.replace(" ", "-"), {**settings, **changed}, make=make)
            yield near(f"{name} beside a single worker", losses, beside, limit)
        yield from _formats(on, worker)
        yield from _only_gpu(on, worker, settings, alone)
        record = flight.dump_flight_recorder()
        said = f"{len(record)} bytes, nccl {b'nccl' in record}"
        yield judged("flight record", "has entries" + (" of NCCL" if on.gpu else ""), said, ok=_entries(record, on) > 0)
        begun = time.monotonic()
        process_group.leave_process_group(within_s=process_group.TEAR_DOWN_S)
        took_s = time.monotonic() - begun
        yield judged("leaving as after a failure", "under 5 s", f"{took_s:.2f} s", ok=took_s < 5)
        # `start` takes leave of a group again, and finds none; its barrier needs one.
        worker_barrier, Worker.barrier = Worker.barrier, lambda _: None
    Worker.barrier = worker_barrier
    yield _failure(on)


def _formats(on: Ground, worker: Worker) -> Iterator[Point]:
    """What gathering parameters in bf16 gives, which is not the default: time of a step, and memory."""
    size = dataclasses.replace(on.size(), **({"layers": 8, "embed": 1024, "heads": 16} if on.gpu else {}), steps=16)
    found = {}
    for kind in ("fp32", "bf16"):
        marks: list[float] = []
        peaks: list[float] = []

        def after(trainer: Trainer, marks: list[float] = marks, peaks: list[float] = peaks) -> None:
            def mark(*_: Any) -> None:
                if on.gpu:  # in each step, since the Trainer's lines of metrics begin the peak anew
                    peaks.append(torch.cuda.max_memory_allocated(on.device) / 2**20)
                if trainer.step in (4, size.steps - 1):
                    on.sync()
                    marks.append(time.perf_counter())

            trainer.optimizer.register_step_post_hook(mark)

        gc.collect()
        if on.gpu:
            torch.cuda.reset_peak_memory_stats(on.device)
        settings = {"precision": "bf16", "log_every": size.steps, "fsdp": {"param_dtype": kind}}
        train(on, worker, f"gathered-{kind}", settings, size=size, make=fsdp, before=after)
        found[kind] = ((marks[1] - marks[0]) / (size.steps - 5), max(peaks, default=0.0))
    told = ", ".join(f"{kind} {took_s * 1e3:.1f} ms and {mib:.0f} MiB" for kind, (took_s, mib) in found.items())
    yield shown("a step of fsdp with parameters gathered in", told)
    if on.gpu:
        less = found["bf16"][1] < found["fp32"][1]
        yield judged("gathered in bf16", "less memory than in fp32", told, ok=less)


def _only_gpu(on: Ground, worker: Worker, settings: dict[str, Any], alone: list[float]) -> Iterator[Point]:
    if not on.gpu:
        yield skipped("SyncBatchNorm, shards in the host's memory")
        return
    losses, _, _ = train(on, worker, "offload", {**settings, "fsdp": {"cpu_offload": True}}, make=fsdp)
    yield near("fsdp with shards in the host's memory", losses, alone, 1e-4)
    size = on.size()

    def model() -> nn.Module:
        return Normed(size.vocabulary, size.embed)

    with_sync = {**settings, "ddp": {"sync_batchnorm": True}}
    plain, _, _ = train(on, worker, "norm", settings, model=model, make=ddp)
    synced, trainer, _ = train(on, worker, "sync-norm", with_sync, model=model, make=ddp)
    yield near("SyncBatchNorm beside BatchNorm", synced, plain, 1e-4)
    refused = not trainer.training.engine.memory.can_recover
    yield judged("recovery from lack of memory with SyncBatchNorm", "not promised", refused, ok=refused)


def _entries(record: bytes, on: Ground) -> int:
    found = json.loads(record) if record else {}
    entries = found.get("entries", [])
    if on.gpu:
        return sum("nccl" in str(entry.get("profiling_name", "")) for entry in entries)
    return len(entries)


class Short:
    """A loss that lacks memory at one place of the first step, for more than some samples."""

    def __init__(self, on: Ground, place: str, samples: int) -> None:
        self.on, self.place, self.samples = on, place, samples
        self.held: list[torch.Tensor] = []

    def run_out(self) -> None:
        """Ask for more than there is: on a GPU really, else by the error that it would be."""
        if not self.on.gpu:
            raise torch.OutOfMemoryError("injected")
        self.held.append(torch.empty(int(torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device=self.on.device))

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """As the benchmark's loss."""
        short = len(batch[0]) > self.samples
        if short and self.place == "forward":
            self.run_out()
        value = loss(model, batch)
        if short and self.place == "loss":
            self.run_out()
        if short and self.place == "backward":
            value.register_hook(lambda _: self.run_out())
        return value


def lack_of_memory(on: Ground) -> Iterator[Point]:
    """Memory that runs out in each part of a step; what happens then, and whether memory is given back."""
    size = on.size()
    # Smaller parts add up in another order, of which AdamW's first steps would make much.
    settings: dict[str, Any] = {"steps": STEPS, "optimizer": "sgd", "momentum": 0.0, "lr": 0.05}
    if on.gpu:
        torch.cuda.set_per_process_memory_fraction(0.1)
    with start() as worker:
        whole, _, _ = train(on, worker, "whole", settings)
        for place in ("forward", "loss", "backward"):
            seen: list[int] = []

            def note(trainer: Trainer, seen: list[int] = seen) -> None:
                trainer.optimizer.register_step_post_hook(lambda *_: seen.append(trainer.training.position.batch.micro))

            losses, trainer, _ = train(
                on, worker, f"short-{place}", settings, loss=Short(on, place, size.micro_batch // 2), before=note
            )
            halved = seen == [size.micro_batch // 2] * STEPS
            yield judged(f"memory runs out in the {place} pass", "halves once, and trains on", seen, ok=halved)
            yield near(f"losses after it ran out in the {place} pass", losses, whole, 1e-5)
        del trainer
        yield from _optimizer(on, worker, settings)
        gc.collect()
        if on.gpu:
            # Products keep 32 MiB for each thread that has made one, on a GPU of the Hopper kind: no training's memory.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            left = torch.cuda.memory_allocated() / 2**20
            yield judged("memory still allocated after the trainings, MiB", "below 64", f"{left:.1f}", ok=left < 64)
        else:
            yield skipped("memory still allocated after the trainings")
    if on.gpu:
        torch.cuda.set_per_process_memory_fraction(1.0)
    answers = together(on, "exchange.one_is_short", 2, limit_s=90)
    learnt = [answer["micro"] for answer in answers]
    yield judged(
        "two workers, one short of memory", "both halve, none waits", learnt, ok=learnt == [size.micro_batch // 2] * 2
    )


def _optimizer(on: Ground, worker: Worker, settings: dict[str, Any]) -> Iterator[Point]:
    short = Short(on, "optimizer", 0)

    def first_step(trainer: Trainer) -> None:
        trainer.optimizer.register_step_pre_hook(lambda *_: short.run_out())

    try:
        train(on, worker, "short-optimizer", settings, before=first_step)
        found = "nothing was raised"
    except Exception as exc:  # noqa: BLE001 - what it is, is the question
        found = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
    # No smaller batch helps there: what it allocates depends on the parameters alone.
    yield judged(
        "memory runs out in the first optimizer step", "a WorkerFailed that says so", found, ok="WorkerFailed" in found
    )


def _failure(on: Ground) -> Point:
    begun = time.monotonic()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "benchmarks.gpu", "--part", "exchange.fails", "--given", "{}"]
    argv += [] if on.gpu else ["--cpu"]
    done = subprocess.run(
        argv, cwd=on.folder, env=environ, capture_output=True, text=True, check=False, timeout=100
    )  # fmt: skip
    said = (done.stderr.strip().splitlines() or [""])[-1]
    figure = f"exit code {done.returncode} after {time.monotonic() - begun:.0f} s: {said}"
    ended = done.returncode == 1 and "injected" in done.stderr
    return judged("the end of a worker that has failed", "exit code 1 and its error, no SIGABRT", figure, ok=ended)


def fails(on: Ground) -> dict[str, Any]:
    """Part of `groups`: a worker with a group, and work on its way, that fails."""
    with group_of_one(on):
        dist.all_reduce(torch.ones(1 << 20, device=on.device), async_op=True)
        raise RuntimeError("injected")


def one_is_short(on: Ground) -> dict[str, Any]:
    """Part of `lack_of_memory`, on each of two workers: the second lacks memory in the first step."""
    size = on.size()
    with on_one_gpu(on, timeout_s=60) as worker:
        short = Short(on, "forward" if worker.rank == 1 else "never", size.micro_batch // 2)
        _, trainer, _ = train(on, worker, "short", {"steps": 3, "strategy": "ddp"}, loss=short)
        return {"micro": trainer.training.position.batch.micro}
