"""Every check of `make gpu` in the form that a CPU shows, and a loop of the benchmark for GPUs with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_loops
from benchmarks.gpu_checks.ground import Ground
from tests import forked

OWN_PROCESS = (11, 13)
"""torch's compiler warns of itself; signals are for the process that gets them."""

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize("check", gpu.PROGRAMME, ids=lambda check: f"{check.number}-{check.name}")
def test_the_cpu_form_of_each_check(check: gpu.Listed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DTCTL_METRICS", "metrics.jsonl")  # and what a check sets there is taken back
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if check.number in OWN_PROCESS:
        row = gpu.run_one(check, cpu=True, limit_s=1000)
        assert row["ended"] == "", row["output"]
        points = [(point["what"], point["found"], point["verdict"]) for point in row["points"]]
    else:
        found = gpu.named(check.where)(Ground(torch.device("cpu"), tmp_path))
        points = [(point.what, point.found, point.verdict) for point in found]
    assert points
    assert not [point for point in points if point[2] == "failed"]
    assert {verdict for *_, verdict in points} <= {"ok", "shown", "skipped"}
    assert all("needs a GPU" in found for _, found, verdict in points if verdict == "skipped")


@pytest.mark.parametrize(("loop", "setting"), [("bare", "bf16+fsdp")])
def test_a_loop_runs_with_a_tiny_model(tmp_path: Path, loop: str, setting: str) -> None:
    argv = [gpu_loops.__file__, "--one", loop, "--sizes", "tiny", "--settings", setting, "--device", "cpu"]
    done = forked.launch(argv, 1, cwd=tmp_path)
    assert done.code == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    assert found["parameters"] == 64 * 32 + 32 * 32 + 2 * (12 * 32 * 32 + 4 * 32) + 2 * 32
    assert found["tokens_per_s"] > 0
    assert found["step_ms"] > 0
