"""What a snapshot costs training and how long it takes, beside a bare copy, torch.save and torch's own checkpoints.

    python benchmarks/snapshot.py              128 MiB and 1 GiB; a minute or two on an idle machine
    python benchmarks/snapshot.py --mib 128    one size
    python benchmarks/snapshot.py --run        what a save every 50 steps adds to a training; two minutes

All of them take the same state (a GPT's tensors with AdamW's moments) in turn, A B C A B C, in one process with one
thread, so that a slow moment of the machine hits all alike. Nobody is measured while another one still writes. Times
are medians, and ratios those of pairs. Refuses to measure on a machine that is busy with something else. Results are
kept in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from machine import keep, wait_for_quiet
from torch import nn

from dtctl.runtime.snapshot import load, optimizer_tree, read
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.saver import Saver

MIB = 1 << 20
WIDTH = 512
BARS = (
    ("stall", "dtctl", "bare copy", 1.25),
    ("stall", "dtctl", "dcp.async_save", 0.75),
    ("whole", "dtctl", "torch.save + fsync", 1.3),
    ("load", "dtctl", "dcp.load", 1.0),
    ("stall", "dtctl in memory", "bare copy", 1.25),
    ("stall", "dtctl in memory", "dcp.async_save", 1.0),
    ("load", "dtctl in memory", "bare copy", 1.2),
    ("verify", "dtctl in memory", "one sum", 1.2),
    ("verify", "dtctl in memory", "XXH3", 1.2),
)
IN_MEMORY = "/dev/shm"
"""Where `train.snapshot.memory` puts them."""


def state(size_bytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and two moments of as many blocks of a GPT as make up the size."""
    shapes = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
    shapes |= {f"{name}.bias": (shape[0],) for name, shape in list(shapes.items())} | {"norm": (WIDTH,)}
    numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
    blocks = max(1, round(size_bytes / (numbers * 4 * 3)))
    names = [(f"blocks.{block}.{name}", shape) for block in range(blocks) for name, shape in shapes.items()]
    generator = torch.Generator().manual_seed(0)
    return {
        part: {name: torch.randn(shape, generator=generator) for name, shape in names}
        for part in ("model", "exp_avg", "exp_avg_sq")
    }


def flat(parts: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One level of names."""
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def timed(action: Callable[[], object]) -> float:
    """Seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Round:
    """One size: its state, and what is measured with it."""

    def __init__(self, size_bytes: int, folder: Path) -> None:
        self.parts = state(size_bytes)
        self.flat = flat(self.parts)
        self.folder = folder
        self.copies = [torch.empty_like(tensor) for tensor in self.flat.values()]
        self.saver = Saver(folder / "dtctl", keep=1, complain=lambda error: print(error.message))
        self.near = Path(tempfile.mkdtemp(dir=IN_MEMORY, prefix="dtctl-bench-"))
        self.near_saver = Saver(self.near, keep=1, in_memory=True, complain=lambda error: print(error.message))
        self.step = 0
        self.times: dict[str, dict[str, list[float]]] = {"stall": {}, "whole": {}, "load": {}, "verify": {}}

    def note(self, what: str, who: str, seconds: float) -> None:
        """Keep one figure."""
        self.times[what].setdefault(who, []).append(seconds)

    def saves(self) -> None:
        """Each once."""
        sources = list(self.flat.values())
        self.note("stall", "bare copy", timed(lambda: torch._foreach_copy_(self.copies, sources)))
        self.step += 1
        began = time.perf_counter()
        self.saver.save(self.step, self.parts, facts={})
        self.note("stall", "dtctl", time.perf_counter() - began)
        self.saver.finish()
        self.note("whole", "dtctl", time.perf_counter() - began)
        began = time.perf_counter()
        self.near_saver.save(self.step, self.parts, facts={})
        self.note("stall", "dtctl in memory", time.perf_counter() - began)
        self.near_saver.finish()
        self.note("whole", "dtctl in memory", time.perf_counter() - began)
        shutil.rmtree(self.folder / "async", ignore_errors=True)
        began = time.perf_counter()
        future = dcp.async_save(self.flat, checkpoint_id=self.folder / "async", no_dist=True)
        self.note("stall", "dcp.async_save", time.perf_counter() - began)
        future.result()
        self.note("whole", "dcp.async_save", time.perf_counter() - began)
        self.note("whole", "torch.save + fsync", timed(self._torch_save))

    def close(self) -> None:
        """Give the memory back."""
        self.near_saver.close()
        shutil.rmtree(self.near)

    def _torch_save(self) -> None:
        with (self.folder / "state.pt").open("wb") as file:
            torch.save(self.parts, file)
            file.flush()
            os.fsync(file.fileno())

    def loads(self) -> None:
        """Each once, into tensors that are there; ours with every digest compared."""
        # Touched: who comes first would else pay for everyone's memory.
        targets = {name: torch.zeros_like(tensor) for name, tensor in self.flat.items()}
        nested = {part: {name: targets[f"{part}.{name}"] for name in names} for part, names in self.parts.items()}

        def check() -> None:
            assert all(torch.equal(targets[name], tensor) for name, tensor in self.flat.items())
            for tensor in targets.values():
                tensor.zero_()

        def ours(folder: Path) -> None:
            found = load.newest(folder, into=nested)
            assert found is not None

        def one_sum() -> None:
            for tensor in self.flat.values():
                tensor.view(-1).view(torch.int64).sum()

        def xxh3() -> None:
            state_ = layout.build_hasher(layout.HASH_IN_MEMORY)
            for tensor in self.flat.values():
                state_.update(tensor.numpy().data.cast("B"))

        def verify() -> None:
            verdict, _ = read.find_newest_good(self.near, {})
            assert verdict is not None

        # Processor time: digests of several files are computed side by side. The sum is of words of 64 bits, the
        # fastest way to read each byte once; XXH3 is what the digest takes of bytes that are mapped already.
        for who, action in (("one sum", one_sum), ("XXH3", xxh3), ("dtctl in memory", verify)):
            began_s = time.process_time()
            action()
            self.note("verify", who, time.process_time() - began_s)

        def torchs() -> None:
            loaded = torch.load(self.folder / "state.pt", weights_only=True)
            for name, tensor in flat(loaded).items():
                targets[name].copy_(tensor)

        sources = list(self.flat.values())
        self.note("load", "bare copy", timed(lambda: torch._foreach_copy_(list(targets.values()), sources)))
        check()
        self.note("load", "dtctl", timed(lambda: ours(self.folder / "dtctl")))
        check()
        self.note("load", "dtctl in memory", timed(lambda: ours(self.near)))
        check()
        self.note(
            "load", "dcp.load", timed(lambda: dcp.load(targets, checkpoint_id=self.folder / "async", no_dist=True))
        )
        check()
        self.note("load", "torch.load", timed(torchs))
        check()


def memory_mib() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def held_mib(field: str) -> float:
    """A size of this process by the kernel: VmRSS is what it has, VmHWM the most since the mark was set."""
    text = Path("/proc/self/status").read_text()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(field)) / 1024


def extra_memory(parts: dict[str, dict[str, torch.Tensor]], mib: int, folder: Path) -> float:
    """The most memory that three of our snapshots take beside a state, in states; nothing was saved before."""
    saver = Saver(folder / "memory", keep=1, complain=lambda error: print(error.message))
    before = held_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    for step in (1, 2, 3):
        saver.save(step, parts, facts={})
    saver.finish()
    shutil.rmtree(folder / "memory")
    return (held_mib("VmHWM") - before) / mib


def measure(mib: int, repetitions: int, folder: Path) -> dict[str, object]:
    """All figures of one size, printed as well."""
    found = Round(mib * MIB, folder)
    extra = extra_memory(found.parts, mib, folder)
    found.saves()  # memory is touched for the first time, modules are imported
    found.loads()
    found.times = {what: {} for what in found.times}
    for _ in range(repetitions):
        found.saves()
        found.loads()
    found.close()
    print(f"\n{mib} MiB, {len(found.flat)} tensors, median of {repetitions}")
    medians = {
        what: {who: statistics.median(times) for who, times in by_program.items()}
        for what, by_program in found.times.items()
    }
    for what, by_program in medians.items():
        for who, median in sorted(by_program.items(), key=lambda item: item[1]):
            print(f"  {what:6} {who:20} {1000 * median:9.1f} ms")
    bars = {}
    for what, ours, theirs, bar in BARS:
        pairs = zip(found.times[what][ours], found.times[what][theirs], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        bars[f"{what}: {ours} / {theirs}"] = {"ratio": round(ratio, 3), "bar": bar, "met": ratio <= bar}
        print(f"  {what}: {ratio:.2f} of {theirs}, bar {bar}: {'met' if ratio <= bar else 'MISSED'}")
    met = extra <= MEMORY_BAR
    bars["memory: dtctl / state"] = {"ratio": round(extra, 3), "bar": MEMORY_BAR, "met": met}
    print(f"  memory: {extra:.2f} of the state, beside it, bar {MEMORY_BAR}: {'met' if met else 'MISSED'}")
    return {"tensors": len(found.flat), "seconds": found.times, "bars": bars, "max_rss_mib": memory_mib()}


MEMORY_BAR = 1.1
EVERY = 50
RUN_BAR = 0.02
TOKENS = 48
BESIDE = 10
"""Steps that are timed with a save; it is over by then."""


class Training:
    """Blocks of a GPT without attention, trained with AdamW: 128 MiB of state, some tens of milliseconds a step."""

    def __init__(self, folder: Path) -> None:
        block = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(5) for layer in block))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(TOKENS, WIDTH)
        self.folder, self.saved = folder, 0
        self.saver = Saver(folder / "run", keep=1, complain=lambda error: print(error.message))

    def steps(self, save: Callable[[], Callable[[], object]] | None) -> float:
        """Seconds for some steps that begin with a save; its end is waited for after them."""
        began, finish = time.perf_counter(), None
        if save is not None:
            finish = save()
        for _ in range(BESIDE):
            self.optimizer.zero_grad()
            (self.model(self.inputs) - self.inputs).square().mean().backward()
            self.optimizer.step()
        took = time.perf_counter() - began
        if finish is not None:
            finish()
        return took

    def ours(self) -> Callable[[], object]:
        """Begin a snapshot of dtctl's."""
        self.saved += 1
        tree = optimizer_tree(self.model, self.optimizer)
        self.saver.save(self.saved, {"model": self.model.state_dict(), "optimizer": tree}, facts={})
        return self.saver.finish

    def torchs(self) -> Callable[[], object]:
        """Begin one of torch's."""
        shutil.rmtree(self.folder / "async", ignore_errors=True)
        state_ = {"model": self.model.state_dict(), "optimizer": optimizer_tree(self.model, self.optimizer)}
        return dcp.async_save(state_, checkpoint_id=self.folder / "async", no_dist=True).result


def run_cost(repetitions: int, folder: Path) -> dict[str, object]:
    """What a save every 50 steps adds to them.

    A save is over long before 50 steps are, and more steps would only bring more noise, so that the time of the first
    ones is compared with that of as many without a save before and after them, and set against 50.
    """
    training = Training(folder)
    programs = {"nothing": None, "dtctl": training.ours, "dcp.async_save": training.torchs}
    for save in (None, *programs.values()):
        training.steps(save)
    bare: list[float] = []
    added: dict[str, list[float]] = {name: [] for name in programs}
    before = training.steps(None)
    for _ in range(repetitions):
        for name, save in programs.items():
            took = training.steps(save)
            after = training.steps(None)
            bare.append(after)
            added[name].append((took - (before + after) / 2) / (EVERY / BESIDE * (before + after) / 2))
            before = after
    mib = sum(p.numel() for p in training.model.parameters()) * 12 // MIB
    step_ms = 1000 * statistics.median(bare) / BESIDE
    medians = {name: statistics.median(shares) for name, shares in added.items()}
    print(f"\na save every {EVERY} steps of {step_ms:.0f} ms, {mib} MiB of state, median of {repetitions}")
    for name, share in medians.items():
        print(f"  {name:20} {share:+7.2%}")
    word = "met" if medians["dtctl"] <= RUN_BAR else "MISSED"
    print(f"  bar for dtctl {RUN_BAR:.0%}: {word}; CheckFreq's paper: 3.5%")
    return {"step_ms": round(step_ms, 2), "mib": mib, "added": added, "median": medians, "bar": RUN_BAR}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, action="append", help="size of the state; several are allowed")
    parser.add_argument("--run", action="store_true", help="the cost to a whole run instead")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path.home(), help="on the disk that is meant")
    parser.add_argument("--busy", action="store_true", help="measure on a busy machine too; the result says so")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed")
    torch.set_num_threads(1)
    if not options.busy:
        wait_for_quiet()
    kept: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "busy": options.busy,
    }
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".dtctl-bench-") as temporary:
        if options.run:
            kept["run"] = run_cost(options.repetitions, Path(temporary))
        for mib in [] if options.run else options.mib or [128, 1024]:
            kept[f"{mib} MiB"] = measure(mib, options.repetitions, Path(temporary))
    keep("snapshot", kept)


if __name__ == "__main__":
    main()
