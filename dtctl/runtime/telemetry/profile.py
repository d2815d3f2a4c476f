"""Profiles of a few steps, by torch's profiler and its memory records, by configuration or on SIGUSR2.

    kill -USR2 PID        records the next steps of that worker, while it trains

Files go to `profile/` in the run's folder: `trace-rank0-step120.json` opens in https://ui.perfetto.dev,
`memory-rank0-step120.pickle` in https://pytorch.org/memory_viz, and `top-rank0-step120.txt` lists the operations that
took most time, alone and by the lines of code that called them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dtctl import names
from dtctl.runtime.console import say
from dtctl.runtime.distributed.worker import Worker
from dtctl.train.config import ProfileConfig

TOP = 10
"""Number of operations in each table."""
STACK = 5
"""Number of calls in a stack that identify one entry of the second table."""


class Profiler:
    """Recorder of profiles of some steps on this worker."""

    def __init__(self, config: ProfileConfig, worker: Worker, *, folder: Path | None = None) -> None:
        """Prepare without recording anything, and without loading torch's profiler.

        Args:
            config: settings of what to record.
            worker: this worker.
            folder: folder for the records. None: `profile` in the run's folder, or in the working folder without dtctl.
        """
        self._config, self._worker = config, worker
        self._folder = folder or Path(os.environ.get(names.RUN_DIR) or ".") / "profile"
        self._asked = False
        self._active: Any = None
        self._first = 0

    @contextmanager
    def handling_profile_signal(self) -> Iterator[None]:
        """Handle SIGUSR2 while the body runs, and write a record under way when it ends."""
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGUSR2, self._request_profile) if main else None
        try:
            yield
        finally:
            if main:
                signal.signal(signal.SIGUSR2, before)
            if self._active is not None:
                self._stop_profile()

    def _request_profile(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True

    def begin_profile_step(self, step: int) -> None:
        """Start a record if one is due or requested at this step."""
        if self._active is None and (self._asked or step == self._config.start):
            self._asked = False
            self._start_profile(step)

    def end_profile_step(self, step: int, *, last: bool) -> None:
        """End a step. Work after the last step, such as its snapshot, belongs to no record."""
        if self._active is not None and (last or step - self._first + 1 >= self._config.steps):
            self._stop_profile()

    def _start_profile(self, step: int) -> None:
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        cuda = self._worker.device.type == "cuda"
        if cuda and self._config.memory:
            torch.cuda.memory._record_memory_history()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._first = step
        self._active = profile(
            activities=activities, profile_memory=self._config.memory, record_shapes=True, with_stack=True,
            # otherwise `key_averages` has no stacks (pytorch#100253)
            experimental_config=_ExperimentalConfig(verbose=True),
        )  # fmt: skip
        self._active.start()

    def _stop_profile(self) -> None:
        active, self._active = self._active, None
        if self._worker.device.type == "cuda":
            torch.cuda.synchronize(self._worker.device)  # kernels that were started in the window belong to it
        active.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._worker.rank}-step{self._first}"
        path = self._folder / f"trace-{name}.json"
        active.export_chrome_trace(str(path))
        busiest = "self_cuda_time_total" if self._worker.device.type == "cuda" else "self_cpu_time_total"
        tables = [
            active.key_averages().table(sort_by=busiest, row_limit=TOP),
            active.key_averages(group_by_stack_n=STACK).table(sort_by=busiest, row_limit=TOP, max_name_column_width=60),
        ]
        (self._folder / f"top-{name}.txt").write_text("\n".join(tables), encoding="utf-8")
        if self._worker.device.type == "cuda" and self._config.memory:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-{name}.pickle"))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        say(f"recorded from step {self._first} on: {path}")


@contextmanager
def keep_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Return a context that restores a model's buffers at its end."""
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, kept in zip(model.buffers(), before, strict=True):
            buffer.copy_(kept)
