"""The benchmark for GPUs runs on a CPU with a tiny model, and refuses to measure without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.torch


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_loops", *argv],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("there is no GPU here; `--sizes tiny --device cpu` tries the program out")


@pytest.mark.parametrize(("loop", "setting"), [("bare", "bf16+fsdp")])
def test_a_loop_runs_with_a_tiny_model(tmp_path: Path, loop: str, setting: str) -> None:
    done = run(tmp_path, "--one", loop, "--sizes", "tiny", "--settings", setting, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parameters"] == 64 * 32 + 32 * 32 + 2 * (12 * 32 * 32 + 4 * 32) + 2 * 32
    assert found["tokens_per_s"] > 0
    assert found["step_ms"] > 0
