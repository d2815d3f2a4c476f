"""What experts gain, and what a layer of them costs.

    python benchmarks/experts.py --torchtitan DIR      everything; DIR is a checkout of torchtitan v0.2.2
    python benchmarks/experts.py --only gain longer    needs no idle machine; some half hour
    python benchmarks/experts.py --only layer workers --torchtitan DIR --busy      only to see that it runs

gain: examples/moe is trained with experts, and as the dense model with as much computation for a byte, with several
seeds, in one process; longer: the same with more steps. layer: `dtctl.runtime.MoE` beside a layer written
by hand, in one process. workers: beside the layer of torchtitan, the experts of both divided over two workers. Both are
timed in turn (experts_layer.py), and refuse a machine that is busy with something else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from machine import HERE, keep, wait_for_quiet

ROOT = HERE.parent
EXAMPLE = ROOT / "examples" / "moe"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
MODELS = {"experts": [], "dense": ["--train.model.experts=0"]}
PARTS = ("gain", "longer", "layer", "workers")
LONGER = 2000
"""Steps."""
STEPS = {"small": 40, "large": 8}
"""Passes of a round."""


def trained(arguments: list[str], folder: Path) -> list[dict[str, float]]:
    """Train the example; step and loss on the validation text of each evaluation."""
    own = {"DTCTL_METRICS": str(folder / "metrics.jsonl"), "DTCTL_RUN_DIR": str(folder.parent)}
    argv = [sys.executable, str(EXAMPLE / "train.py"), f"--train.snapshot.dir={folder / 'snapshots'}", *arguments]
    folder.mkdir()
    done = subprocess.run(argv, env=ENVIRONMENT | own, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"training failed:\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{"step": row["step"], "val_loss": row["val_loss"]} for row in rows if "val_loss" in row]


def gain(seeds: int, settings: list[str]) -> dict[str, object]:
    """The loss of both models after each evaluation, seed by seed."""
    kept: dict[str, list[list[dict[str, float]]]] = {name: [] for name in MODELS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, seeds + 1):
            for name, arguments in MODELS.items():
                rows = trained([f"--train.seed={seed}", *settings, *arguments], Path(folder) / f"{name}-{seed}")
                kept[name].append(rows)
                print(f"seed {seed}, {name}: " + ", ".join(f"{row['val_loss']:.3f}" for row in rows), flush=True)
    return {**kept, "median": {name: statistics.median(rows[-1]["val_loss"] for rows in kept[name]) for name in kept}}


def layers(workers: int, rounds: int, torchtitan: Path | None) -> dict[str, object]:
    """Nanoseconds per token of a worker, of each layer and shape, and dtctl's share of the others, round by round."""
    kept: dict[str, object] = {}
    for shape, steps in STEPS.items():
        argv = [str(HERE / "experts_layer.py"), shape, str(rounds + 1), str(steps)]
        if workers > 1:
            argv = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", *argv]
        argv += ["--torchtitan", str(torchtitan)] if torchtitan else []
        done = subprocess.run([sys.executable, *argv], env=ENVIRONMENT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{shape} failed:\n{done.stderr[-3000:]}")
        took: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
        own = took["dtctl"][1:]  # the first round warms up
        kept[shape] = {
            name: {
                "ns_per_token": round(statistics.median(values[1:]), 1),
                "dtctl_takes": round(statistics.median(a / b for a, b in zip(own, values[1:], strict=True)), 4),
            }
            for name, values in took.items()
        }
        print(f"{workers} workers, {shape}: {json.dumps(kept[shape])}", flush=True)
    return kept


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--torchtitan", type=Path, help="a checkout; without one, workers are not compared")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--busy", action="store_true", help="also on a busy machine; nothing is kept")
    options = parser.parse_args()
    if "workers" in options.only and options.torchtitan is None:
        parser.error("the part workers needs --torchtitan")
    kept: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {"torch": version("torch"), "python": platform.python_version(), "cores": str(os.cpu_count())},
    }
    if "gain" in options.only:
        kept["gain"] = gain(options.seeds, [])
    if "longer" in options.only:
        kept["longer"] = gain(options.seeds, [f"--train.steps={LONGER}"])
    for part, workers in (("layer", 1), ("workers", 2)):
        if part in options.only:
            if not options.busy:
                wait_for_quiet()
            kept[part] = layers(workers, options.rounds, options.torchtitan)
    if not options.busy:
        keep("experts", kept)


if __name__ == "__main__":
    main()
