"""Measurements during training: times of steps, memory, utilization of the hardware, and slow workers.

The measurements cost so little that they are always on: two reads of the clock per step and, for a line of metrics, one
exchange
that the loss needs anyway.
"""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path
from typing import Any, Final

import torch

from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.telemetry.hardware import find_peak_flops

GIB: Final = float(1 << 30)
AHEAD: Final = 8
"""Largest number of steps that a process may have queued on a GPU. Without a limit the process queues hundreds of steps
with few kernels, and then waits for all of them together, which looks like a hang."""


class HostClock:
    """Clock of this process."""

    def mark(self) -> float:
        """Return the present time."""
        return time.perf_counter()

    def measure_seconds(self, begin: float, end: float) -> float:
        """Return the seconds from one mark to the next."""
        return end - begin

    def wait(self, mark: float) -> None:
        """Return at once, since a mark of this clock is always in the past."""


class GpuClock:
    """Clock of a GPU's stream: a mark is queued, and reached when all earlier work is done.

    The process itself only queues kernels. The time of queueing is not that of the kernels. If the queue is full, the
    process waits for kernels of earlier steps, and through them for other workers.
    """

    def mark(self) -> torch.cuda.Event:
        """Queue a mark and return it."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def measure_seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds from one mark to the next; wait for the later one."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait until the GPU has reached the mark."""
        mark.synchronize()


def build_step_clock(device: torch.device) -> Any:
    """Return the clock for the times of steps on a device."""
    return GpuClock() if device.type == "cuda" else HostClock()


class StepTimes:
    """Times of the steps since the last line of metrics, on the device's own clock."""

    def __init__(self, clock: Any = None) -> None:
        self._clock = clock or HostClock()
        self._last = self._clock.mark()
        self._steps: list[tuple[Any, Any]] = []
        self._own: list[tuple[Any, Any]] = []
        self._waited_s = 0.0

    def record_passes(self, own: tuple[Any, Any] | None, waited_s: float) -> None:
        """Record the times of a step's passes.

        Args:
            own: marks of the begin and end of work that does not wait for other workers: data and forward passes.
            waited_s: seconds that the loop waited for data.
        """
        if own is not None:
            self._own.append(own)
        self._waited_s += waited_s

    def step(self) -> None:
        """Record the end of a step."""
        now = self._clock.mark()
        self._steps.append((self._last, now))
        self._last = now
        if len(self._steps) > AHEAD:
            self._clock.wait(self._steps[-1 - AHEAD][1])

    def pause(self, seconds: float) -> None:
        """Exclude time that was not spent on steps."""
        self._last = self._last + seconds if isinstance(self._last, float) else self._clock.mark()

    def pop_time_spread(self) -> tuple[dict[str, float], float, float]:
        """Return the spread of the times since the last call, and reset it.

        Returns:
            `step_p50_s`, `step_p95_s` and `step_max_s`; this worker's own time per step, in seconds; and the share of
            the time of steps, from 0 to 1, in which it waited for data.
        """
        steps_s = sorted(self._clock.measure_seconds(*marks) for marks in self._steps)
        own_s = sum(self._clock.measure_seconds(*marks) for marks in self._own)
        waited_s, self._waited_s = self._waited_s, 0.0
        self._steps, self._own = [], []
        if not steps_s:
            return {}, 0.0, 0.0
        last = len(steps_s) - 1
        spread = {"p50": steps_s[last // 2], "p95": steps_s[round(0.95 * last)], "max": steps_s[-1]}
        share = min(1.0, waited_s / sum(steps_s)) if sum(steps_s) else 0.0
        return {f"step_{name}_s": round(value, 6) for name, value in spread.items()}, own_s / len(steps_s), share


def find_slowest_rank(own_s: torch.Tensor) -> dict[str, float]:
    """Return the slowest rank, by the time per step in which each worker did not wait for others.

    Args:
        own_s: this time of each rank, in seconds.

    Returns:
        `slowest_rank`, `slowest_own_s` and `median_own_s`; empty for a single worker.
    """
    if len(own_s) < 2:
        return {}
    values = own_s.tolist()
    slowest = max(range(len(values)), key=values.__getitem__)
    return {
        "slowest_rank": slowest,
        "slowest_own_s": round(values[slowest], 6),
        "median_own_s": round(statistics.median(values), 6),
    }


def find_fullest_rank(peaks_gib: torch.Tensor) -> dict[str, float]:
    """Return the rank that needs most memory, as stages of a pipeline and uneven shards differ.

    Args:
        peaks_gib: first figure of `measure_worker_memory` for each rank.

    Returns:
        `fullest_rank` and `fullest_gib`; empty for a single worker.
    """
    if len(peaks_gib) < 2:
        return {}
    rank = int(peaks_gib.argmax())
    return {"fullest_rank": rank, "fullest_gib": round(float(peaks_gib[rank]), 4)}


def measure_worker_memory(device: torch.device) -> dict[str, float]:
    """Return this worker's memory in GiB.

    On a GPU these are the peaks since the last call, else the present size of the process and its peak.
    """
    if device.type == "cuda":
        figures = {
            "memory_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }
        torch.cuda.reset_peak_memory_stats(device)
    else:
        figures = {"rss_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
        status = Path("/proc/self/statm")
        if status.exists():  # only Linux reports the current memory of a process
            figures["rss_gib"] = int(status.read_text().split()[1]) * resource.getpagesize() / GIB
    return {name: round(value, 4) for name, value in figures.items()}


class ModelFlopsUtilization:
    """Model FLOPs utilization (Chowdhery et al. 2022, appendix B).

    It is the share of the hardware's peak rate that the model uses.
    """

    def __init__(self, worker: Worker, precision: str, flops_per_sample: float | None) -> None:
        """Look up the peak rate of this worker's device.

        Args:
            worker: this worker; the others are assumed to have the same device.
            precision: number format of the computation.
            flops_per_sample: floating point operations for a sample, forward and backward; None if unknown.
        """
        name = torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else ""
        peak = find_peak_flops(name, precision)
        self._share = flops_per_sample / (peak * worker.world_size) if peak and flops_per_sample else None

    def compute_mfu(self, samples_per_s: float) -> dict[str, float]:
        """Return `mfu` for a speed; empty if the peak rate or the model's work is unknown."""
        return {} if self._share is None else {"mfu": round(self._share * samples_per_s, 4)}


def estimate_flops_per_sample(model: torch.nn.Module, tokens_per_sample: int | None) -> float | None:
    """Return the model's own `estimate_flops_per_sample`, else 6 per parameter and token (Kaplan et al. 2020, 2.1)."""
    told = getattr(model, "flops_per_sample", None)
    if told is not None:
        return float(told)
    if tokens_per_sample is None:
        return None
    return 6.0 * tokens_per_sample * sum(parameter.numel() for parameter in model.parameters())
