"""Whether the GPU computes what the CPU does, and the same bits twice; compiled blocks; attention in parts."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_checks.ground import (
    Ground,
    Point,
    equal,
    judged,
    model_of,
    near,
    on_one_gpu,
    shown,
    skipped,
    together,
    train,
    weights,
)
from benchmarks.gpu_loops import Size, loss, tokens_of
from dtctl.runtime import Outcome, Trainer, start
from dtctl.runtime.data_loading.order import SampleOrder, WorkerSampler
from dtctl.runtime.strategies.context import lower_right
from dtctl.train.batch import BatchSizes


def courses(on: Ground) -> Iterator[Point]:
    """Losses on the device beside the CPU's, in each precision, and fp16 beside torch's GradScaler."""
    cpu = Ground(torch.device("cpu"), on.folder)
    size = cpu.size()
    with start(deterministic=on.gpu) as worker:  # else atomic additions may come out otherwise than beside GradScaler
        host = dataclasses.replace(worker, device=cpu.device)
        expected, _, _ = train(cpu, host, "cpu", size=size)
        single, _, _ = train(on, worker, "fp32", size=size)
        yield near("fp32 beside the CPU", single, expected, 1e-4)
        half, _, _ = train(on, worker, "bf16", {"precision": "bf16"}, size=size)
        yield near("bf16 beside fp32", half, single, 2e-2)
        settings = {"precision": "fp16", "optimizer": "sgd", "momentum": 0.0, "lr": 0.05}
        skips: list[int] = []

        def note(trainer: Trainer) -> None:
            discard = trainer.training.engine.strategy.discard
            trainer.training.engine.strategy.discard = lambda: (skips.append(trainer.step), discard())[1]  # type: ignore[method-assign]

        _, trainer, _ = train(on, worker, "fp16", settings, size=size, before=note, loss=steep)
        model, skipped_steps = _scaled_by_torch(on, trainer, size)
        yield judged(
            "fp16: steps that are skipped", f"those of GradScaler, {skipped_steps}", skips, ok=skips == skipped_steps
        )
        same = equal(weights(trainer), {name: value.cpu() for name, value in model.state_dict().items()})
        yield judged("fp16: weights after 20 steps", "the same bits as with GradScaler", same, ok=same)


def steep(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss whose gradient overflows at the first scale of fp16."""
    return loss(model, batch) * 32


def _scaled_by_torch(on: Ground, trainer: Trainer, size: Size) -> tuple[nn.Module, list[int]]:
    model = model_of(size).to(on.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler(on.device.type)
    inputs, targets = tokens_of(size)
    sizes = BatchSizes(micro=size.micro_batch, accumulate=1, world_size=1)
    schedule = WorkerSampler(
        SampleOrder(len(inputs), trainer.training.settings.config.seed), sizes, rank=0, end=size.steps * sizes.total
    )
    missed = []
    for step in range(size.steps):
        chosen = torch.from_numpy(schedule(step * sizes.total)[0])
        batch = inputs[chosen].to(on.device), targets[chosen].to(on.device)
        optimizer.zero_grad()
        with torch.autocast(on.device.type, dtype=torch.float16):
            value = steep(model, batch)
        scaler.scale(value.float()).backward()
        scaler.unscale_(optimizer)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            missed.append(step)
    return model, missed


CHECKPOINTING = ("none", "full", "selective")
HALF = 10
VERDICTS = ("exact: ", "not exact: ", "not confirmed: ")
"""How the line begins that says what repeating steps has shown."""
STEPS = 20


def exactness(on: Ground) -> Iterator[Point]:
    """The same training twice, and one that is stopped and goes on, with deterministic kernels and without."""
    for deterministic in (True, False):
        if not deterministic and not on.gpu:
            yield skipped("what is claimed of kernels that are not deterministic")
            continue
        (answer,) = together(on, "numbers.twice", 1, limit_s=120, deterministic=deterministic)
        for name, found in answer.items():
            what = name if deterministic else f"{name}, kernels as they come"
            if not deterministic:
                yield shown(
                    what, f"same bits twice {found['twice']}, stopped {found['stopped']}; said: {found['said']}"
                )
                honest = found["stopped"] or not found["said"].startswith("exact: ")
                yield judged(f"{what}: the claim", "exact only with the same bits", found["said"], ok=honest)
                continue
            both = found["twice"] and found["stopped"]
            yield judged(what, "the same bits twice, and after a stop", found, ok=both)
            said = found["said"].startswith("exact: steps ")
            yield judged(f"{what}: the claim", "exact: steps repeated", found["said"], ok=said)
    one, two = (together(on, "numbers.elastic", count, limit_s=120)[0]["digest"] for count in (1, 2))
    yield judged("exact: elastic with 1 and 2 workers", "equal digests", f"{one[:12]} {two[:12]}", ok=one == two)


def twice(on: Ground, *, deterministic: bool) -> dict[str, Any]:
    """Part of `exactness`, in a process of its own: whether bits are the same."""
    found: dict[str, Any] = {}
    size = on.size(dropout=0.1)
    with start(deterministic=deterministic) as worker:
        for kind in CHECKPOINTING if deterministic else CHECKPOINTING[:1]:
            settings = {
                "steps": STEPS, "precision": "bf16", "checkpointing": kind, "deterministic": deterministic,
                "log_every": STEPS,
            }  # fmt: skip
            names = (f"{kind}-{deterministic}-{number}" for number in range(2))
            ends = [weights(train(on, worker, name, settings, size=size)[1]) for name in names]
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                name = f"{kind}-{deterministic}-stopped"
                _, trainer, outcome = train(on, worker, name, settings, size=size, before=_stopping(HALF))
                stopped = (outcome, trainer.step)
                _, trainer, _ = train(on, worker, name, settings, size=size)
            verdicts = [line for line in said.getvalue().splitlines() if line.startswith(VERDICTS)]
            found[f"checkpointing {kind}"] = {
                "twice": equal(*ends),
                "stopped": stopped == (Outcome.STOPPED, HALF) and equal(ends[0], weights(trainer)),
                "said": verdicts[-1] if verdicts else "no verdict",
            }
    return found


def _stopping(step: int) -> Callable[[Trainer], None]:
    """Asks a training to stop while a step is on its way, as Slurm would."""

    def before(trainer: Trainer) -> None:
        done = trainer.training.report.step

        def after(number: int) -> None:
            done(number)
            if number == step:
                signal.raise_signal(signal.SIGTERM)

        # Not by a hook of the optimizer, which is part of the program that a resume compares.
        trainer.training.report.step = after  # type: ignore[method-assign]

    return before


def elastic(on: Ground) -> dict[str, Any]:
    """Part of `exactness`, on each of some workers: a digest of the weights in the end."""
    size = on.size(dropout=0.1)
    settings = {
        "steps": 6, "exact": "elastic", "micro_batch": 2, "global_batch": 8, "log_every": 6, "deterministic": on.gpu,
    }  # fmt: skip
    with on_one_gpu(on, deterministic=on.gpu, timeout_s=60) if _has_peers() else start(deterministic=on.gpu) as worker:
        _, trainer, _ = train(on, worker, "elastic", settings, size=size)
        return {"digest": digest(trainer.model.state_dict())}


def _has_peers() -> bool:

    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """Of names and bytes."""
    found = hashlib.blake2b()
    for name, value in state.items():
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def compiled(on: Ground) -> Iterator[Point]:
    """Blocks compiled by themselves, with each kind of checkpointing: no compilation after step 3, the same losses."""
    backend = "inductor" if on.gpu else "aot_eager"
    precision = "bf16" if on.gpu else "fp32"
    with start() as worker:
        for kind in CHECKPOINTING:
            settings = {"precision": precision, "checkpointing": kind, "steps": 10}
            plain, _, _ = train(on, worker, f"plain-{kind}", settings)
            guarded = contextlib.ExitStack()

            def forbid(trainer: Trainer, guarded: contextlib.ExitStack = guarded) -> None:
                def after(*_: Any) -> None:
                    if trainer.step == 3:
                        guarded.enter_context(torch._dynamo.config.patch(error_on_recompile=True))

                trainer.optimizer.register_step_post_hook(after)

            with guarded:
                torch._dynamo.reset()
                fast, _, _ = train(
                    on, worker, f"compiled-{kind}", {**settings, "compile": backend}, before=forbid
                )  # which raises where a graph is made anew
            yield near(f"{backend}, checkpointing {kind}", fast, plain, 1e-2)


def attention(on: Ground) -> Iterator[Point]:
    """Attention of context parallel, part by part, beside that of the whole sequence, forward and backward."""
    tokens, width, dtype, limit = (32768, 64, torch.bfloat16, 2e-2) if on.gpu else (32, 8, torch.float32, 1e-5)
    pieces = 8  # two for each of 4 workers
    for name, heads, kv_heads in (("8 heads", 8, 8), ("8 heads of queries, 2 of keys", 8, 2)):
        source = torch.Generator(on.device).manual_seed(0)
        q, k, v = (
            torch.randn(1, count, tokens, width, device=on.device, dtype=dtype, generator=source).requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        )
        gradient = torch.randn(q.shape, device=on.device, dtype=dtype, generator=source)
        options = {"enable_gqa": True} if heads != kv_heads else {}

        def parts(q: Any = q, k: Any = k, v: Any = v, options: Any = options) -> torch.Tensor:
            step = tokens // pieces
            return torch.cat(
                [
                    lower_right(rows, k[..., : (at + 1) * step, :], v[..., : (at + 1) * step, :], **options)
                    for at, rows in enumerate(q.split(step, dim=-2))
                ],
                dim=-2,
            )

        whole = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        expected = [whole.detach(), *torch.autograd.grad(whole, (q, k, v), gradient)]
        del whole
        with torch.profiler.profile() as profile:
            if on.gpu:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if on.gpu else 0
            result = parts()
            found = [result.detach(), *torch.autograd.grad(result, (q, k, v), gradient)]
            on.sync()
            peak = torch.cuda.max_memory_allocated() - before if on.gpu else 0
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
        yield judged(f"{name}: output and gradients", f"within {limit:g}", f"{off:.2g}", ok=off <= limit)
        called = {event.key for event in profile.key_averages()}
        flash = sorted(key for key in called if "flash" in key and "attention" in key)
        if not on.gpu:
            yield skipped(f"{name}: the kernel, and memory for masks")
            continue
        yield judged(f"{name}: the kernel", "flash attention", ", ".join(flash[:2]) or "another", ok=bool(flash))
        # Outputs, gradients and what flash keeps; a mask of this length would be 1 GiB.
        room = 24 * q.numel() * q.element_size() / 2**20
        figure = f"{peak / 2**20:.0f} MiB"
        yield judged(f"{name}: memory", f"below {room:.0f} MiB, no masks", figure, ok=peak / 2**20 < room)
