"""What is measured: spreads, stragglers, memory, use of hardware."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dtctl.runtime import Worker
from dtctl.runtime.telemetry import hardware, meter
from dtctl.runtime.telemetry.hardware import find_peak_flops
from tests.unit.runtime.conftest import Make


class Clock:
    now = 50.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter, "time", clock)
    return clock


def test_the_spread_is_of_the_window(clock: Clock) -> None:
    times = meter.StepTimes()
    for milliseconds in range(1, 101):
        clock.now += milliseconds / 1000
        times.record_passes((1.0, 1.5), 0.0)
        times.step()
    spread, own_s, _ = times.pop_time_spread()
    assert spread["step_p50_s"] == 0.050
    assert spread["step_p95_s"] == 0.095
    assert spread["step_max_s"] == 0.100
    assert own_s == 0.5
    assert times.pop_time_spread() == ({}, 0.0, 0.0)


def test_pauses_are_left_out(clock: Clock) -> None:
    times = meter.StepTimes()
    clock.now += 5.25
    times.pause(5.0)
    times.step()
    assert times.pop_time_spread()[0]["step_max_s"] == 0.25


def test_the_slowest_is_named() -> None:
    assert meter.find_slowest_rank(torch.tensor([0.1])) == {}
    found = meter.find_slowest_rank(torch.tensor([0.1, 0.5, 0.2], dtype=torch.float64))
    assert found == {"slowest_rank": 1, "slowest_own_s": 0.5, "median_own_s": 0.2}


def test_memory_is_that_of_the_process() -> None:
    before = meter.measure_worker_memory(torch.device("cpu"))
    assert 0.05 < before["rss_gib"] <= before["rss_peak_gib"] * 1.01
    held = torch.ones(64 << 20, dtype=torch.uint8)
    after = meter.measure_worker_memory(torch.device("cpu"))
    assert after["rss_gib"] - before["rss_gib"] == pytest.approx(len(held) / (1 << 30), abs=0.01)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA GH200 480GB", "fp16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla T4", "fp32", 8.1e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA H200 NVL", "bf16", 835.5e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", 312e12 * 3 / 7),
        ("NVIDIA A30 MIG 2g.12gb", "fp32", 10.3e12 / 2),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA RTX A6000", "fp32", 38.7e12),
        ("AMD Instinct MI325X", "bf16", 1307.4e12),
        ("AMD Instinct MI250X/MI250", "bf16", 191.5e12),
        ("NVIDIA GeForce GTX 1080", "fp32", None),
    ],
)
def test_peaks_are_found_by_name(name: str, precision: str, peak: float | None) -> None:
    assert find_peak_flops(name, precision) == (peak if peak is None else pytest.approx(peak))


def test_every_peak_has_a_source_and_half_is_faster() -> None:
    for name, peak in hardware.PEAKS.items():
        assert peak.source.startswith("https://"), name
        assert peak.half > 1.9 * peak.single, name


def test_use_is_known_where_peak_and_work_are(worker: Worker) -> None:
    assert meter.ModelFlopsUtilization(worker, "bf16", 1e9).compute_mfu(10.0) == {}
    model = nn.Linear(9, 10)
    assert meter.estimate_flops_per_sample(model, None) is None
    assert meter.estimate_flops_per_sample(model, 7) == 6 * 7 * 100
    model.flops_per_sample = 5  # type: ignore[assignment]
    assert meter.estimate_flops_per_sample(model, 7) == 5.0


def test_lines_have_what_was_measured(make: Make, tmp_path: Path) -> None:
    make().run()
    (*_, row) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 0 < row["step_p50_s"] <= row["step_p95_s"] <= row["step_max_s"]
    assert row["rss_gib"] > 0
    assert "slowest_rank" not in row


class Event:
    """Stands for torch.cuda.Event: kernels take a second each, and asking for them takes no time."""

    queue_s = 0.0
    waited = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = Event.queue_s

    def synchronize(self) -> None:
        Event.waited += 1

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


def test_on_a_gpu_times_are_those_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "queue_s", 0.0)
    clock = meter.build_step_clock(torch.device("cuda", 0))
    times = meter.StepTimes(clock)
    for kernels in (4.0, 2.0, 3.0):
        begin = clock.mark()
        Event.queue_s += kernels / 4
        times.record_passes((begin, clock.mark()), 0.0)
        Event.queue_s += 3 * kernels / 4
        times.step()
        Event.queue_s += 50.0  # a snapshot's copies
        times.pause(0.001)
    assert Event.waited == 0, "a step waits for nothing"
    assert times.pop_time_spread() == ({"step_p50_s": 3.0, "step_p95_s": 4.0, "step_max_s": 4.0}, 0.75, 0.0)
    assert meter.build_step_clock(torch.device("cpu")).mark is not None


def test_the_fullest_worker_is_named() -> None:
    assert meter.find_fullest_rank(torch.tensor([1.5])) == {}
    assert meter.find_fullest_rank(torch.tensor([10.25, 71.5, 70.0])) == {"fullest_rank": 1, "fullest_gib": 71.5}


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA A100-SXM4-80GB", 156e12), ("Tesla V100-SXM2-32GB", 15.7e12)])
def test_tf32_has_a_peak_of_its_own_where_there_is_tf32(name: str, peak: float) -> None:
    assert find_peak_flops(name, "tf32") == pytest.approx(peak)


def test_a_process_is_never_many_steps_ahead_of_its_gpu() -> None:
    class Queue(meter.HostClock):
        """Marks are numbers, and each is noted when it is waited for."""

        def __init__(self) -> None:
            self.marks, self.waited = 0, list[float]()

        def mark(self) -> float:
            self.marks += 1
            return self.marks

        def wait(self, mark: float) -> None:
            self.waited.append(mark)

    queue = Queue()
    times = meter.StepTimes(queue)
    for _ in range(meter.AHEAD):
        times.step()
    assert queue.waited == []
    times.step()
    times.step()
    assert queue.waited == [2, 3], "the ends of the first two steps"
    times.pop_time_spread()
    times.step()
    assert len(queue.waited) == 2, "a line of metrics has waited for all of them"


def test_the_share_of_time_waited_for_data_is_that_of_the_steps_since_the_last_line(clock: Clock) -> None:
    times = meter.StepTimes()
    for _ in range(4):
        clock.now += 2.0
        times.record_passes(None, 0.5)
        times.step()
    assert times.pop_time_spread()[2] == 0.25
    clock.now += 1.0
    times.step()
    assert times.pop_time_spread()[2] == 0.0
