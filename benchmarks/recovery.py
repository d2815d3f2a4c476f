"""How long a job stands still when a worker is killed, and how long its first start takes: dtctl and torchrun.

    python benchmarks/recovery.py                          100 kills each; some minutes on an idle machine
    python benchmarks/recovery.py --kills 10               a minute or two
    python benchmarks/recovery.py --only "dtctl, warm"     one program

A small model in DDP on this machine, two workers; one of them gets SIGKILL in mid-run, again and again. Measured: from
the kill to the first step that all workers have done again, without a snapshot (loading one comes on top, everywhere
alike), and how many of the kills were recovered from. Refuses to measure on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from machine import keep, wait_for_quiet

HERE = Path(__file__).resolve().parent
SCRIPT = """\
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    with open(os.path.join(sys.argv[1], f"steps.{rank}"), "a", buffering=1) as file:
        for step in range(int(sys.argv[2])):
            optimizer.zero_grad()
            model(torch.ones(4, 32)).sum().backward()
            optimizer.step()
            file.write(json.dumps([os.getpid(), step, time.time()]) + "\\n")
            time.sleep(0.005)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
LIMIT_S = 60.0
PROGRAMS = ("dtctl, warm", "dtctl, cold", "dtctl, kind torchrun", "torchrun")


@dataclass
class Series:
    """What the kills of one program came to."""

    recovered_s: list[float] = field(default_factory=list)
    kills: int = 0


def lines(path: Path) -> list[tuple[int, int, float]]:
    """Process, step and time of every step that a worker has done."""
    try:
        text = path.read_text()
    except OSError:
        return []
    return [tuple(json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def last_of(path: Path, not_pid: int) -> tuple[int, int, float] | None:
    """The first step of the newest process in a file, if that is another than `not_pid` and has done some."""
    found = lines(path)
    if not found or found[-1][0] == not_pid:
        return None
    pid = found[-1][0]
    return next(line for line in found if line[0] == pid)


def wait(condition, process: subprocess.Popen[bytes]):  # type: ignore[no-untyped-def]
    """The first true value of `condition`; None when it took too long, or the process has given up."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := condition():
            return found
        time.sleep(0.002)
    return None


def _all_run(steps: list[Path], before: list[int]) -> bool:
    """Whether all workers, none of which was there before, are well under way."""
    return all(sum(pid not in before for pid, _, _ in lines(path)) > 20 for path in steps)


def _all_again(steps: list[Path], before: list[int]) -> list[tuple[int, int, float]] | None:
    """The first steps of the workers after those of `before`, when all have done one."""
    found = [last_of(path, pid) for path, pid in zip(steps, before, strict=True)]
    return [line for line in found if line is not None] if None not in found else None


def kill_again_and_again(argv: list[str], folder: Path, series: Series, kills: int) -> None:
    """One launch whose second worker is killed until the program gives up or all kills are done."""
    for path in folder.glob("steps.*"):
        path.unlink()
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(argv, cwd=folder, stdout=output, stderr=output, start_new_session=True)
    steps = [folder / "steps.0", folder / "steps.1"]
    pids = [0, 0]
    try:
        while series.kills < kills:
            if not wait(partial(_all_run, steps, pids), process):
                return
            pids = [lines(path)[-1][0] for path in steps]
            series.kills += 1
            killed = time.time()
            os.kill(pids[1], signal.SIGKILL)
            again = wait(partial(_all_again, steps, pids), process)
            if again is None:
                return
            series.recovered_s.append(max(line[2] for line in again) - killed)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def spec(folder: Path, *, slots: int, restarts: int, steps: int, preload: str = "", kind: str = "direct") -> list[str]:
    """The argv of a dtctl launch."""
    text = (
        f"cluster: {{transport: local, slots: {slots}}}\n"
        f"job: {{script: train.py, args: ['{folder}', {steps}], kind: {kind}, max_restarts: {restarts}{preload}, "
        f"grace_s: 2, env: {{OMP_NUM_THREADS: 1}}}}\n"
    )
    path = folder / "dtctl.yaml"
    path.write_text(text)
    return [str(Path(sys.executable).parent / "dtctl"), "launch", str(path)]


def torchrun(folder: Path, *, restarts: int, steps: int) -> list[str]:
    """The argv of stock torchrun with its own restarts."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", f"--max-restarts={restarts}",
        "--master-addr=127.0.0.1", "--master-port=29511", "train.py", str(folder), str(steps),
    ]  # fmt: skip


def first_start(folder: Path, slots: int, repetitions: int) -> float:
    """Median seconds from the launch to the first step of the last of `slots` workers on one node."""
    found = []
    for _ in range(repetitions):
        for path in folder.glob("steps.*"):
            path.unlink()
        wait_for_quiet()
        begun = time.time()
        argv = spec(folder, slots=slots, restarts=1, steps=1)
        subprocess.run(argv, cwd=folder, capture_output=True, check=True, timeout=300)
        found.append(max(lines(folder / f"steps.{rank}")[0][2] for rank in range(slots)) - begun)
    return statistics.median(found)


def floor(folder: Path, repetitions: int) -> float:
    """Median seconds from the start of two bare processes to the first step of both: the least that new ones need."""
    found = []
    for number in range(repetitions):
        for path in folder.glob("steps.*"):
            path.unlink()
        wait_for_quiet()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29520 + number), "WORLD_SIZE": "2"}
        begun = time.time()
        workers = [
            subprocess.Popen(
                [sys.executable, "train.py", str(folder), "1"],
                cwd=folder,
                env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        for worker in workers:
            worker.wait(LIMIT_S)
        found.append(max(lines(folder / f"steps.{rank}")[0][2] for rank in range(2)) - begun)
    return statistics.median(found)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--only", action="append", choices=[*PROGRAMS, "first start"], default=[])
    options = parser.parse_args()
    if options.kills % 5:
        parser.error("--kills has to be a multiple of 5: the programs are killed in turn, five times each")
    kills, wanted = options.kills, options.only or [*PROGRAMS, "first start"]
    os.environ["OMP_NUM_THREADS"] = "1"
    wait_for_quiet()
    versions = {"python": platform.python_version(), "cores": str(os.cpu_count())}
    kept: dict[str, object] = {"date": time.strftime("%Y-%m-%d %H:%M"), "versions": versions}
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".dtctl-bench-") as temporary:
        folder = Path(temporary)
        (folder / "train.py").write_text(SCRIPT)
        rows: dict[str, Series] = {name: Series() for name in PROGRAMS if name in wanted}
        begin = {
            "dtctl, warm": lambda left: spec(folder, slots=2, restarts=left, steps=10**9),
            "dtctl, cold": lambda left: spec(folder, slots=2, restarts=left, steps=10**9, preload=", preload: []"),
            "dtctl, kind torchrun": lambda left: spec(folder, slots=2, restarts=left, steps=10**9, kind="torchrun"),
            "torchrun": lambda left: torchrun(folder, restarts=left, steps=10**9),
        }
        for target in range(5, kills + 1, 5):  # in turn, five kills each
            for name, series in rows.items():
                wait_for_quiet()
                while series.kills < target:  # one that gave up is begun again, and the kill counts
                    kill_again_and_again(begin[name](5), folder, series, target)
        print(f"{'':20} {'kills':>6} {'recovered':>10} {'median s':>9} {'p95 s':>7} {'max s':>7}")
        for name, series in rows.items():
            got = sorted(series.recovered_s) or [float("nan")]
            row = {
                "kills": series.kills,
                "recovered": len(series.recovered_s),
                "median_s": round(statistics.median(got), 3),
                "p95_s": round(got[int(0.95 * (len(got) - 1))], 3),
                "max_s": round(got[-1], 3),
            }
            kept[name] = row
            print(
                f"{name:20} {row['kills']:6} {row['recovered']:10} {row['median_s']:9.3f} {row['p95_s']:7.3f} "
                f"{row['max_s']:7.3f}"
            )
        if "dtctl, cold" in rows:
            bare_s = floor(folder, 5)
            kept["floor s"] = round(bare_s, 3)
            print(f"two bare processes need {bare_s:.2f} s to their first step: the floor of a cold restart")
        if "first start" not in wanted:
            keep("recovery", kept)
            return
        one, eight = (first_start(folder, slots, 3) for slots in (1, 8))
        kept["first start"] = {
            "1 worker s": round(one, 3),
            "8 workers s": round(eight, 3),
            "ratio": round(eight / one, 3),
        }
        print(f"first start: 1 worker {one:.2f} s, 8 workers on the node {eight:.2f} s, ratio {eight / one:.2f}")
    keep("recovery", kept)


if __name__ == "__main__":
    main()
