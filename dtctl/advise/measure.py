"""Predicted and measured memory: starts the workers of `trial` on this machine and compares.

A third figure comes from torch's own tracker (`run_memory_tracker`), which needs neither workers nor memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dtctl
from dtctl import children
from dtctl.errors import UsageError, WorkerFailed
from dtctl.estimate.memory import ParallelLayout, estimate_layout_memory
from dtctl.estimate.model import ModelProfile

STEPS = 3
"""Number of steps; the optimizer creates its state in the first one."""
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMeasurement:
    """Memory of one strategy on some workers, measured and estimated."""

    strategy: str
    workers: int
    predicted: float
    """Bytes of tensors, without overhead."""
    measured: float
    """Bytes of the fullest worker."""
    tracked: float | None = None
    """Bytes of tensors as torch's tracker counts them; None where it cannot follow."""
    untracked: str | None = None
    """Reason why the tracker cannot follow the model."""

    @property
    def relative_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def measure_training_memory(
    model: ModelProfile, *, strategy: str, workers: int, micro_batch: int = 1, module: str | None = None,
    python: str = sys.executable,
) -> MemoryMeasurement:  # fmt: skip
    """Train a few steps in fp32 and measure their memory.

    Args:
        model: its figures; without `module` a GPT of this shape is made.
        strategy: ddp or fsdp.
        workers: processes, on this machine.
        micro_batch: samples of each.
        module: factory of the real model, `module:factory`.
        python: the job's.

    Raises:
        UsageError: there is no model to build, or not enough memory for it here.
        WorkerFailed: a worker failed or took too long.
    """
    if module is None and not model.ffn:
        raise UsageError(
            "only a plain GPT can be built from numbers", hint="--model module:factory measures a model of your own"
        )
    dp, fsdp = (workers, 1) if strategy == "ddp" else (1, workers)
    need = estimate_layout_memory(model, ParallelLayout(dp=dp, fsdp=fsdp, micro_batch=micro_batch, precision="fp32"))
    shape = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "ffn": model.ffn,
        "vocab": model.vocab,
        "tied": model.tied,
    }
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.7
    if need.tensors * workers > memory_bytes:
        raise UsageError(
            f"{workers} workers need {need.tensors * workers / 2**30:.1f} GiB, and this machine has less memory",
            hint="measure a model with fewer blocks: memory grows with their number",
        )
    # The memory of the libraries is measured with a tiny model, and then subtracted.
    least = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 16, "tied": True}
    trained = {"strategy": strategy, "micro_batch": micro_batch, "steps": STEPS, "log_every": STEPS}
    trainings = [
        {"module": of, "shape": form, "vocab": form["vocab"], "seq": seq, "train": trained}
        for of, form, seq in ((None, least, 8), (module, shape, model.seq))
    ]
    peaks = _measure_peak_bytes(trainings, workers, python)
    settings = {"module": module, "shape": shape, "seq": model.seq, "train": trained}
    tracked, untracked = run_memory_tracker({**settings, "workers": workers}, python)
    return MemoryMeasurement(
        strategy=strategy, workers=workers, predicted=need.tensors, measured=peaks[1] - peaks[0], tracked=tracked,
        untracked=untracked,
    )  # fmt: skip


def run_memory_tracker(settings: dict[str, Any], python: str) -> tuple[float | None, str | None]:
    """Return bytes by torch's tracker, or the reason why there are none; torch may change these tools at any time."""
    argv = children.build_module_argv(python, "dtctl.advise.track", json.dumps(settings), last=str(Path.cwd()))
    try:
        completed = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "PYTHONPATH": _build_python_path()},
        )
        result = json.loads((completed.stdout.strip().splitlines() or [""])[-1])
    except subprocess.TimeoutExpired:
        return None, f"it takes more than {LIMIT_S:.0f} s"
    except ValueError:
        return None, (completed.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return (float(result["peak"]), None) if "peak" in result else (None, str(result["error"]))


def _measure_peak_bytes(trainings: list[dict[str, Any]], workers: int, python: str) -> list[float]:
    """Return the bytes of the fullest worker of each."""
    with tempfile.TemporaryDirectory(prefix="dtctl-measure-") as folder:
        _run_trial_process({"trainings": trainings, "workers": workers, "out": folder}, python, Path(folder))
        return [
            float(max(json.loads(path.read_text())["peak"] for path in Path(folder).glob(f"{number}-*.json")))
            for number in range(len(trainings))
        ]


def _build_python_path() -> str:
    """Return the PYTHONPATH with which a worker can import dtctl."""
    root = str(Path(dtctl.__file__).resolve().parent.parent)
    return os.pathsep.join(entry for entry in (root, os.environ.get("PYTHONPATH")) if entry)


def _run_trial_process(settings: dict[str, Any], python: str, folder: Path) -> None:
    """Start `trial` and wait for its end.

    Raises:
        WorkerFailed: one of its workers failed, or they take too long.
    """
    environ = {
        **os.environ, "PYTHONPATH": _build_python_path(), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
    }  # fmt: skip
    argv = children.build_module_argv(python, "dtctl.advise.trial", json.dumps(settings), last=str(Path.cwd()))
    # The processes get a session of their own, so that all of them can be ended together.
    process = subprocess.Popen(
        argv, cwd=folder, env=environ, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        told, complaint = process.communicate(timeout=LIMIT_S * len(settings["trainings"]))
    except subprocess.TimeoutExpired as exc:
        raise WorkerFailed(
            f"the measurement takes more than {LIMIT_S:.0f} s", hint="use a smaller --batch or --seq"
        ) from exc
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        rank, text = None, complaint
        if told.strip():
            failed = json.loads(told.strip().splitlines()[-1])
            rank = failed["rank"]
            text = (folder / f"{failed['training']}-{rank}.log").read_text(errors="replace")
        last = text.strip().splitlines() or ["it printed nothing"]
        where = None if rank is None else f"rank {rank}"
        raise WorkerFailed(f"the measurement failed: {last[-1]}", where=where)
