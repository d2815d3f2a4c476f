"""What the training loop costs, beside a loop written by hand and beside other frameworks.

    python benchmarks/loop.py            everything; some ten minutes on an idle machine
    python benchmarks/loop.py --only tiny --programs bare dtctl --repetitions 5

Every figure is from fresh processes, the programs in turn, A B C A B C, so that a slow moment of the machine hits all
of them alike. Peers live in a virtual environment of their own (`python -m venv benchmarks/.venv-peers`, then `pip
install torch lightning accelerate` there), and are compared with a bare loop in that environment. Refuses to measure on
a machine that is busy with something else. Results are kept in benchmarks/results/ as JSON.
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
from collections.abc import Iterator
from pathlib import Path

from machine import HERE, keep, wait_for_quiet

PEERS = HERE / ".venv-peers" / "bin" / "python"
SCRIPT = str(HERE / "loop_step.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
STEPS = {"tiny": 3000, "small": 600, "large": 100}
PARTS = ("tiny", "small", "start-up", "workers", "elastic")
Program = tuple[str, str]
"""Name of a loop, and the Python that runs it."""


def run(program: Program, size: str, steps: int, *, workers: int = 1) -> dict[str, float]:
    """One loop in fresh processes; its answer, with the seconds from the start of the process to its first step."""
    name, python = program
    argv = [python, SCRIPT, name, size, str(steps)]
    if workers > 1:
        argv[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.time()
        done = subprocess.run(
            argv, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=600, check=False
        )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    answer: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**answer, "first_step_s": answer["first_step_at"] - began_s}


def rounds(repetitions: int, limit_s: float) -> Iterator[int]:
    """Numbers of rounds on a quiet machine, 0 for the one that does not count; no round that would end too late."""
    began_s = before_s = time.monotonic()
    for repetition in range(repetitions + 1):
        wait_for_quiet()
        yield repetition
        now_s = time.monotonic()
        if repetition and now_s + (now_s - before_s) > began_s + limit_s:
            return
        before_s = now_s


def in_turn(
    programs: dict[str, Program], size: str, steps: int, repetitions: Iterator[int], *, key: str
) -> dict[str, list[float]]:
    """One figure of every program, several times over, after one round that does not count."""
    found: dict[str, list[float]] = {label: [] for label in programs}
    for repetition in repetitions:
        for label, program in programs.items():
            value = run(program, size, steps)[key]
            if repetition:
                found[label].append(value)
    return found


def overhead(programs: dict[str, Program], size: str, repetitions: Iterator[int]) -> dict[str, object]:
    """Microseconds that each loop adds to those of a bare loop in the same environment, pair by pair."""
    found = in_turn(programs, size, STEPS[size], repetitions, key="us")
    print(f"\na step of the {size} model\n{'':22} {'us':>8} {'added us':>9} {'ratio':>6}")
    kept: dict[str, object] = {}
    for label, values in found.items():
        floor = found["bare (peers)" if programs[label][1] == str(PEERS) else "bare"]
        added = statistics.median(mine - base for mine, base in zip(values, floor, strict=True))
        ratio = statistics.median(mine / base for mine, base in zip(values, floor, strict=True))
        print(f"{label:22} {statistics.median(values):8.1f} {added:9.1f} {ratio:6.3f}")
        kept[label] = {
            "us": round(statistics.median(values), 1),
            "min_us": round(min(values), 1),
            "max_us": round(max(values), 1),
            "added_us": round(added, 1),
            "ratio": round(ratio, 4),
        }
    return kept


def start_up(repetitions: Iterator[int]) -> dict[str, object]:
    """Seconds from the start of a process to the end of its first step."""
    programs: dict[str, Program] = {"bare": ("bare", sys.executable), "dtctl": ("dtctl", sys.executable)}
    found = in_turn(programs, "tiny", 1, repetitions, key="first_step_s")
    middle = {label: statistics.median(values) for label, values in found.items()}
    ratio = middle["dtctl"] / middle["bare"]
    times = ", ".join(f"{label} {value:.2f} s" for label, value in middle.items())
    print(f"\nstart of the process to its first step: {times}, ratio {ratio:.2f}")
    return {**{label: round(value, 3) for label, value in middle.items()}, "ratio": round(ratio, 3)}


def two_processes(repetitions: Iterator[int]) -> dict[str, object]:
    """Steps per second of two workers that exchange gradients, against two that have nothing to do with each other."""
    rates: dict[str, list[float]] = {"alone": [], "bare DDP": [], "dtctl DDP": []}
    for repetition in repetitions:
        argv = [sys.executable, SCRIPT, "dtctl", "large", str(STEPS["large"])]
        with tempfile.TemporaryDirectory() as folder:
            pair = [
                subprocess.Popen(argv, env=ENVIRONMENT, cwd=folder, stdout=subprocess.PIPE, text=True) for _ in range(2)
            ]
            outputs = [process.communicate(timeout=600)[0] for process in pair]
        alone = statistics.mean(json.loads(output.strip().splitlines()[-1])["us"] for output in outputs)
        bare = run(("bare", sys.executable), "large", STEPS["large"], workers=2)["us"]
        ours = run(("dtctl", sys.executable), "large", STEPS["large"], workers=2)["us"]
        if repetition:
            for label, value in zip(rates, (alone, bare, ours), strict=True):
                rates[label].append(1e6 / value)
    middle = {label: statistics.median(values) for label, values in rates.items()}
    share = {label: middle[label] / middle["alone"] for label in ("bare DDP", "dtctl DDP")}
    print(f"\ntwo workers, steps/s each: {', '.join(f'{label} {value:.1f}' for label, value in middle.items())}")
    print(f"share of two alone: {', '.join(f'{label} {value:.3f}' for label, value in share.items())}")
    return {**{label: round(value, 2) for label, value in middle.items()}, "share": share}


def elastic(repetitions: Iterator[int]) -> dict[str, object]:
    """What `exact: elastic` adds to a step of two workers, beside DDP with the same two micro batches for each."""
    found: dict[str, list[float]] = {"halves": [], "elastic": []}
    for repetition in repetitions:
        for name, values in found.items():
            took_us = run((name, sys.executable), "large", STEPS["large"], workers=2)["us"]
            if repetition:
                values.append(took_us)
    ratios = [one / other for one, other in zip(found["elastic"], found["halves"], strict=True)]
    middle = {name: statistics.median(values) for name, values in found.items()}
    ratio = statistics.median(ratios)
    print(
        f"\ntwo workers, a step: DDP {middle['halves']:.0f} us, elastic {middle['elastic']:.0f} us, ratio {ratio:.3f}"
    )
    return {**{name: round(value, 1) for name, value in middle.items()}, "ratio": round(ratio, 4), "ratios": ratios}


def versions() -> dict[str, str]:
    """What was measured, where."""
    text = (
        "import json, importlib.metadata as found\n"
        "print(json.dumps({one.metadata['Name']: one.version for one in found.distributions()}))"
    )
    kept = {"python": platform.python_version(), "kernel": platform.release(), "cores": str(os.cpu_count())}
    for python in (sys.executable, str(PEERS)):
        if Path(python).exists():
            done = subprocess.run([python, "-c", text], capture_output=True, text=True, check=True)
            listed = json.loads(done.stdout)
            kept |= {name: listed[name] for name in ("torch", "lightning", "accelerate") if name in listed}
    return kept


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--programs", nargs="+", help="those of the steps' table; default: all that are installed")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of each part; it has fewer rounds then")
    options = parser.parse_args()
    programs: dict[str, Program] = {"bare": ("bare", sys.executable), "dtctl": ("dtctl", sys.executable)}
    if PEERS.exists():
        names = {"bare (peers)": "bare", "fabric": "fabric", "accelerate": "accelerate", "lightning": "lightning"}
        programs |= {label: (name, str(PEERS)) for label, name in names.items()}
    programs = {label: program for label, program in programs.items() if label in (options.programs or programs)}
    wait_for_quiet()
    kept: dict[str, object] = {"date": time.strftime("%Y-%m-%d %H:%M"), "versions": versions()}
    for size in ("tiny", "small"):
        if size in options.only:
            kept[size] = overhead(programs, size, rounds(options.repetitions, options.seconds))
    if "start-up" in options.only:
        kept["start-up"] = start_up(rounds(options.repetitions, options.seconds))
    if "workers" in options.only:
        kept["two workers"] = two_processes(rounds(options.repetitions, options.seconds))
    if "elastic" in options.only:
        kept["elastic"] = elastic(rounds(options.repetitions, options.seconds))
    keep("loop", kept)


if __name__ == "__main__":
    main()
