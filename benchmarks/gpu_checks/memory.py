"""Snapshots of a large state beside training, and the memory that advise predicts beside what is needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu_checks.ground import Ground, Point, judged, shown, skipped, together
from dtctl.advise import track
from dtctl.advise.model import build_decoder_model
from dtctl.advise.trial import Decoder, compute_token_loss
from dtctl.estimate.memory import ParallelLayout, estimate_layout_memory
from dtctl.runtime import TensorData, Trainer, Worker, load, start
from dtctl.runtime.optim import build_optimizer as optimizer_of
from dtctl.runtime.precision import make_autocast
from dtctl.runtime.snapshot.load import newest
from dtctl.runtime.strategies import blocks, sharded

GIB = 1 << 30


class Wide(nn.Module):
    """Matrices of 64 MiB each, of which a step computes with little."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((width, width), 1e-3)) for _ in range(count))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """One number for each sample."""
        for part in self.parts:
            batch = torch.tanh(batch @ part)
        return batch.sum(1, keepdim=True)


def _fit(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def snapshots(on: Ground) -> Iterator[Point]:
    """A snapshot that is written while 5 more steps change the state: its bytes, its price, and what it locks."""
    (found,) = together(on, "memory.saved", 1, limit_s=180)
    yield judged("the snapshot's bytes", "the state when it was taken", found["equal"], ok=found["equal"])
    yield judged("steps made beside its writing", "5", found["beside"], ok=found["beside"] == 5)
    if not on.gpu:
        yield skipped("stall, and memory of the host")
        return
    yield shown("time of the device at the first one, which locks its memory", f"{found['first_s']:.2f} s")
    stall = f"{found['stall_s']:.3f} s for {found['state_gib']:.1f} GiB"
    yield judged("time of the device at the second one", "below 0.5 s", stall, ok=found["stall_s"] < 0.5)
    share = found["host_gib"] / found["state_gib"]
    figure = f"{found['host_gib']:.1f} GiB, {share:.2f} of the state"
    yield judged("memory of the host", "below 1.1 of the state", figure, ok=share < 1.1)


TAKEN = 6
"""Step of the snapshot that is looked at: the second one, when its memory is there."""
STEPS = 12


def saved(on: Ground) -> dict[str, Any]:
    """Part of `snapshots`, in a process of its own, since it looks at the peak of its memory."""
    count, width = (40, 4096) if on.gpu else (3, 64)  # 12 bytes a parameter: 8 GB
    data = TensorData(torch.randn(64, width), torch.randn(64, 1))
    folder = on.folder / "snapshots"
    settings = {
        "steps": STEPS, "micro_batch": 8, "log_every": 100, "lr": 1e-4, "on_oom": "stop",
        "snapshot": {"dir": str(folder), "every_steps": 3, "keep": 4},
    }  # fmt: skip
    found: dict[str, Any] = {"equal": False, "state_gib": 12 * count * width**2 / GIB}
    kept: dict[str, torch.Tensor] = {}
    marks: list[tuple[Any, Any]] = []
    with start() as worker:
        trainer = Trainer(load(settings, argv=[], environ={}), worker, lambda: Wide(count, width), _fit, data)
        engine, clock = trainer.training.engine, trainer.training.report.clock
        save, update = trainer.save, engine.update_parameters
        before = _process("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew

        def timed(*, needed: bool = True) -> None:
            if TAKEN < trainer.step < STEPS:  # the newest is to be found as it was written
                return
            trainer.training.snapshots.saver.wait()
            if trainer.step == TAKEN:
                kept.update({name: value.clone() for name, value in trainer.model.state_dict().items()})
            on.sync()
            begun = clock.mark()
            save(needed=needed)
            marks.append((begun, clock.mark()))

        def look(step: int) -> None:
            if trainer.step == STEPS - 1:
                found["beside"] = trainer.step - TAKEN
                trainer.training.snapshots.saver.wait()
                found["host_gib"] = (_process("VmHWM") - before) / GIB
                loaded = newest(str(folder))
                state = loaded.parts["model"] if loaded is not None and loaded.step == TAKEN else {}
                found["equal"] = {*state} == {*kept} and all(
                    torch.equal(state[name], kept[name].cpu()) for name in kept
                )
            update(step)

        trainer.save, engine.update_parameters = timed, look  # type: ignore[method-assign]
        trainer.run()
        found["first_s"], found["stall_s"] = (clock.measure_seconds(*pair) for pair in marks[:2])
    return found


def _process(name: str) -> int:
    """A figure of this process in bytes: VmRSS, VmHWM (its peak)."""
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name))) * 1024


SHAPES: dict[str, dict[str, int]] = {
    "124M": {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 50304, "seq": 1024},
    "350M": {"layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 50304, "seq": 1024},
    "1B": {"layers": 18, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 50304, "seq": 1024},
    "3B": {"layers": 26, "hidden": 3072, "heads": 24, "ffn": 12288, "vocab": 50304, "seq": 1024},
}
TINY = {"layers": 2, "hidden": 32, "heads": 2, "ffn": 64, "vocab": 64, "seq": 16}
MESHES: tuple[tuple[str, str, dict[str, int], int], ...] = (
    ("124M", "bf16", {}, 16),
    ("124M", "fp32", {}, 8),
    ("124M", "bf16", {"dp": 8}, 16),
    ("350M", "bf16", {}, 8),
    ("350M", "bf16", {"dp": 16}, 8),
    ("350M", "bf16", {"fsdp": 8}, 8),
    ("1B", "bf16", {}, 4),
    ("1B", "bf16", {"fsdp": 8}, 4),
    ("1B", "fp32", {"fsdp": 8}, 2),
    ("1B", "bf16", {"dp": 2, "fsdp": 8}, 4),
    ("3B", "bf16", {"fsdp": 16}, 2),
    ("3B", "bf16", {"dp": 4, "fsdp": 16}, 2),
)
"""Model, precision, mesh and micro batch."""
OFF = 0.15
"""By which a prediction may be off; the same that `dtctl advise --measure` is held to on CPUs."""


OFF_WITHOUT_GPU = 0.2
"""Beside torch's own tracker, which computes nothing and does not see what fully_shard gathers ahead."""


def predictions(on: Ground) -> Iterator[Point]:
    """The peak of one worker of each mesh, whose other workers are made up, beside what advise predicts."""
    if not on.gpu:
        yield from _tracked()
        return
    for number, (name, precision, mesh, micro_batch) in enumerate(MESHES):
        over = " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one worker"
        what = f"{name} {precision}, {over}, micro batch {micro_batch}"
        found = peak(on, number=number)
        off = found["predicted"] / found["measured"] - 1
        figure = f"{found['predicted'] / GIB:.2f} GiB predicted, {found['measured'] / GIB:.2f} measured, {off:+.1%}"
        yield judged(what, f"within {OFF:.0%}", figure, ok=abs(off) <= OFF)


def _tracked() -> Iterator[Point]:
    """The first model of each number of shards, in fp32, beside torch's tracker; tracing each would take a minute."""
    smallest: dict[int, tuple[str, int]] = {}
    for name, _, mesh, micro_batch in MESHES:
        smallest.setdefault(mesh.get("fsdp", 1), (name, micro_batch))
    for workers, (name, micro_batch) in smallest.items():
        shape = SHAPES[name]
        layout = ParallelLayout(fsdp=workers, micro_batch=micro_batch, precision="fp32")
        predicted = estimate_layout_memory(build_decoder_model(**shape, tied=True), layout).tensors
        built = {key: value for key, value in shape.items() if key != "seq"} | {"tied": True}
        settings = {"micro_batch": micro_batch, "strategy": "fsdp" if workers > 1 else "auto"}
        tracked = track.track_peak_memory(
            {"workers": workers, "module": None, "seq": shape["seq"], "shape": built, "train": settings}
        )
        off = predicted / tracked - 1
        figure = f"{predicted / GIB:.2f} GiB predicted, {tracked / GIB:.2f} by torch's tracker, {off:+.1%}"
        what = f"{name} fp32, {f'fsdp {workers}' if workers > 1 else 'one worker'}, micro batch {micro_batch}"
        yield judged(what, f"within {OFF_WITHOUT_GPU:.0%}", figure, ok=abs(off) <= OFF_WITHOUT_GPU)


def peak(on: Ground, *, number: int) -> dict[str, Any]:
    """Bytes that tensors of one case need, and are said to need."""
    gc.collect()
    if on.gpu:
        torch.cuda.init()  # there are no figures to begin anew before: this check makes no tensor first
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(on.device)
    before = torch.cuda.memory_allocated(on.device) if on.gpu else 0
    name, precision, mesh, micro_batch = MESHES[number]
    shape = SHAPES[name] if on.gpu else TINY
    seq = shape["seq"]
    layout = ParallelLayout(**mesh, micro_batch=micro_batch, precision=precision)  # type: ignore[arg-type]
    need = estimate_layout_memory(build_decoder_model(**shape, tied=True), layout)
    config = load({"precision": precision, "micro_batch": micro_batch, "steps": 3}, argv=[], environ={})
    if layout.workers > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.workers)
    built = {key: value for key, value in shape.items() if key != "seq"}
    with on.device:
        model: nn.Module = Decoder(**built, tied=True)
    first = Worker(
        rank=0, local_rank=0, world_size=layout.workers, local_world_size=layout.workers, node_rank=0,
        device=on.device, backend="fake",
    )  # fmt: skip
    module = _spread(on, model, config, first, layout)
    optimizer = optimizer_of(config, model)
    tokens = torch.randint(shape["vocab"], (micro_batch, seq + 1), device=on.device)
    for _ in range(config.steps or 0):
        optimizer.zero_grad()
        with make_autocast(precision, on.device):
            loss = compute_token_loss(module, (tokens[:, :-1], tokens[:, 1:]))
        loss.backward()
        optimizer.step()
    on.sync()
    measured = torch.cuda.max_memory_allocated(on.device) - before if on.gpu else 0
    if layout.workers > 1:
        dist.destroy_process_group()
    return {"predicted": need.tensors, "measured": measured}


def _spread(on: Ground, model: nn.Module, config: Any, worker: Worker, layout: ParallelLayout) -> nn.Module:
    if layout.fsdp > 1:
        sizes = {axis: size for axis, size in {"dp": layout.dp, "fsdp": layout.fsdp}.items() if size > 1}
        mesh = device_mesh.init_device_mesh(on.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        found = blocks.find_repeated_blocks(model, config.blocks)
        sharded.silence_torch_warnings()
        sharded.shard_blocks(model, found.modules if found else [], config, worker, mesh)
        return model
    if layout.dp > 1:
        device_ids = [on.device.index or 0] if on.gpu else None
        alone = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
        alone.register_comm_hook(None, _as_it_is)  # the reducer waits for a result, which a made-up group has not
        return alone
    return model


def _as_it_is(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and takes no strings
    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    found.set_result(bucket.buffer())
    return found
