"""Processor time that a launch takes on a node until its job starts, and in all, without the SSH login's.

    python benchmarks/node_cost.py                      nodes with this machine's Python; a minute on an idle machine
    python benchmarks/node_cost.py --other PYTHON       and with another version of Python

One virtual host runs in a control group of its own, which counts the processor time of all its processes: the SSH
server, its login, dtctl's program there and the job, which copies the counter when it starts. What a login that runs
`true` takes is measured with bare paramiko and subtracted. The start of an interpreter that does nothing is printed
beside it. Needs the controller cpuacct of cgroup version 1, and root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch import BARE, Bench, versions
from machine import keep, wait_for_quiet

GROUP = Path("/sys/fs/cgroup/cpuacct/dtctl-node-cost")
USAGE = GROUP / "cpuacct.usage"
REPETITIONS = 15


def list_process_tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in list_process_tree(int(child)))]


def measure_node_ms(argv: list[str], bench: Bench) -> float:
    """Processor time in ms that one command causes on the node, once all its processes have ended."""
    before = int(USAGE.read_text())
    subprocess.run(argv, env=bench.env, cwd=bench.folder, check=True, capture_output=True)
    time.sleep(0.3)  # the login's processes end after the connection
    return (int(USAGE.read_text()) - before) / 1e6


def measure_launch_ms(argv: list[str], bench: Bench, copy: Path) -> tuple[float, float]:
    """Processor time in ms of a launch on the node: until its job starts, and in all."""
    before = int(USAGE.read_text())
    whole = measure_node_ms(argv, bench)
    return (int(copy.read_text()) - before) / 1e6, whole


def measure_start_ms(python: str) -> float:
    """Processor time in ms of an interpreter that does nothing, with the options of dtctl's program."""
    before = os.times()
    for _ in range(REPETITIONS):
        subprocess.run([python, "-I", "-S", "-c", "pass"], check=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return 1000 * used / REPETITIONS


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", metavar="PYTHON", help="Python of another version for the node")
    options = parser.parse_args()
    wait_for_quiet()
    kept: dict[str, object] = {"date": time.strftime("%Y-%m-%d %H:%M"), "versions": versions()}
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".dtctl-bench-") as temporary:
        bench = Bench(1, Path(temporary))
        GROUP.mkdir(exist_ok=True)
        try:
            for pid in list_process_tree(bench.sandbox.nodes[0].pid):
                with contextlib.suppress(ProcessLookupError):  # one that has ended since
                    (GROUP / "cgroup.procs").write_text(str(pid))
            launch = bench.program("dtctl", 1)
            assert launch is not None
            spec = Path(launch[-1])
            copy = bench.folder / "usage"
            text = spec.read_text().replace("command: 'true'", f"command: [cp, {USAGE}, {copy}]")
            bare = [sys.executable, "-c", BARE, bench.identity, bench.user, *bench.hosts]
            logins = [measure_node_ms(bare, bench) for _ in range(REPETITIONS)]
            login_ms = statistics.median(logins)
            print(f"a login that runs `true`: {login_ms:.1f} ms")
            for name, python in {"same version": sys.executable, "another version": options.other}.items():
                if python is None:
                    continue
                spec.write_text(text.replace(f"python: {sys.executable}", f"python: {python}"))
                measure_launch_ms(launch, bench, copy)  # the program is brought to the node once
                found = [measure_launch_ms(launch, bench, copy) for _ in range(REPETITIONS)]
                until = sorted(first - login_ms for first, _ in found)
                whole = statistics.median(last - login_ms for _, last in found)
                start_ms = measure_start_ms(python)
                middle = statistics.median(until)
                print(
                    f"{name}: {middle:.1f} ms [{until[0]:.1f}, {until[-1]:.1f}] until the job starts, "
                    f"{whole:.1f} ms in all; an interpreter's start {start_ms:.1f} ms"
                )
                kept[name] = {
                    "median_ms": round(middle, 1), "min_ms": round(until[0], 1), "max_ms": round(until[-1], 1),
                    "whole_ms": round(whole, 1), "interpreter_ms": round(start_ms, 1), "repetitions": REPETITIONS,
                }  # fmt: skip
        finally:
            bench.close()
            time.sleep(0.5)
            GROUP.rmdir()
    keep("node-cost", kept)


if __name__ == "__main__":
    main()
