"""How long the report of a run with 1,000,000 logged steps takes to make, and how large it is.

    python benchmarks/report.py           two minutes, most of which writes the metrics

The bar: under 3 s from the start of the process to its end, under 5 MB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import keep, wait_for_quiet

from dtctl.launch.records.record import RunInfo
from dtctl.launch.records.run_writer import RunWriter

REPEATS = 5


def write_metrics(path: Path, steps: int) -> None:
    """What rank 0 writes, with every key of a GPU job, and an evaluation every 1,000 steps."""
    noise, now = random.Random(0), 1_795_000_000.0
    with path.open("w") as file:
        for step in range(1, steps + 1):
            step_s = 0.2 + 0.02 * noise.random()
            now += step_s
            row = {
                "step": step, "loss": 3 + 3 * math.exp(-step / 2e5) + noise.gauss(0, 0.1),
                "lr": 3e-4 * (1 - step / steps), "grad_norm": 1 + noise.random(),
                "step_s": round(step_s, 6), "samples_per_s": round(64 / step_s, 3),
                "tokens_per_s": round(65536 / step_s, 1), "time": round(now, 3), "step_p50_s": round(step_s, 6),
                "step_p95_s": round(1.1 * step_s, 6), "step_max_s": round(1.2 * step_s, 6), "memory_gib": 61.2,
                "memory_reserved_gib": 65.1, "slowest_rank": 3, "slowest_own_s": 0.0619,
                "median_own_s": 0.034, "mfu": 0.41,
            }  # fmt: skip
            if step % 1000 == 0:
                row["val_loss"] = row["loss"] + 0.1
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as base:
        info = RunInfo(
            run="big", token="t", pid=1, started=1_795_000_000.0, spec="", command=[], detached=False, pid_started=1
        )
        folder = RunWriter.create(Path(base), info).folder
        write_metrics(folder / "metrics.jsonl", steps)
        size = (folder / "metrics.jsonl").stat().st_size
        times = []
        for _ in range(REPEATS):
            wait_for_quiet()
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-m", "dtctl", "report"], cwd=base, check=True, stdout=subprocess.DEVNULL)
            times.append(round(time.perf_counter() - begun, 3))
            print(f"{times[-1]:.2f} s", flush=True)
        page = (folder / "report.html").stat().st_size
    print(f"{steps:,} steps, {size / 1e6:.0f} MB: {statistics.median(times):.2f} s, page of {page / 1e6:.2f} MB")
    keep(
        "report",
        {"steps": steps, "metrics_bytes": size, "times_s": times, "median_s": statistics.median(times),
         "page_bytes": page, "cores": os.cpu_count()},
    )  # fmt: skip


if __name__ == "__main__":
    main()
