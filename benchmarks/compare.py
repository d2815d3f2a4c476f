"""What this commit costs beside another one: launch, push and snapshots, in turn, as medians and their ratio.

    python benchmarks/compare.py --before 99d9278       some minutes on an idle machine; exit code 1 above 1.03
    python benchmarks/compare.py --before 99d9278 --repetitions 3 --busy    only to see that it runs

The other commit is checked out into a folder of its own and run by this Python with PYTHONPATH. Each has virtual hosts
of its own, and each measurement is a fresh process: before, after, before, after, so that a slow moment of the machine
hits both alike; who begins changes from round to round. Refuses to measure on a machine that is busy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from machine import keep, wait_for_quiet

ROOT = Path(__file__).resolve().parent.parent
BAR = 1.03
SPEC = "cluster: {transport: sandbox, nodes: 3, slots: 1}\njob: {script: t.py, kind: direct}\n"
SNAPSHOT = """
import json, sys, time
from pathlib import Path
import torch
from dtctl.runtime.snapshot import read, write
if not hasattr(read, "newest"):
    from dtctl.runtime.snapshot import load as read  # later commits have it there
parts = {"model": {str(i): torch.ones(1 << 20) for i in range(32)}, "optimizer": {"state": {}, "groups": []}}
folder, found = Path(sys.argv[1]), {}
for step in (1, 2, 3):
    begun = time.perf_counter()
    write.save(folder, step, parts, facts={}, keep=2)
    found.setdefault("save", []).append(time.perf_counter() - begun)
    begun = time.perf_counter()
    assert read.newest(folder) is not None
    found.setdefault("read", []).append(time.perf_counter() - begun)
print(json.dumps({name: min(several) for name, several in found.items()}))
"""
Measure = Callable[["Side", Path], dict[str, float]]


class Side:
    """One commit, and its virtual hosts."""

    def __init__(self, tree: Path, base: Path) -> None:
        self.tree = tree
        (base / "sandboxes").mkdir(parents=True)
        own = {"PYTHONPATH": str(tree), "DTCTL_SANDBOX_DIR": str(base / "sandboxes"), "DTCTL_SANDBOX": base.name}
        self.env = {**os.environ, **own, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        self.env["XDG_STATE_HOME"] = str(base / "state")
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)
        # As an installed package is; what was edited or checked out a moment ago would be compiled at each start.
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(tree / "dtctl")], env=self.env, check=True)

    def python(self, *words: str, cwd: Path) -> str:
        """Run this side's code; what it prints."""
        done = subprocess.run(
            [sys.executable, *words], cwd=cwd, env=self.env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{self.tree}: {' '.join(words)[:200]}: {done.stderr[-2000:]}")
        return done.stdout

    def launch(self, folder: Path) -> tuple[float, float]:
        """Seconds of a launch as a whole, and until its workers run."""
        begun = time.perf_counter()
        said = self.python("-m", "dtctl", "launch", "--no-doctor", "--json", cwd=folder)
        took = time.perf_counter() - begun
        return took, float(json.loads(said.splitlines()[-1])["launch_s"])


def project(folder: Path, files: int, seed: int) -> Path:
    """A job that does nothing, with some code beside it that no node has seen."""
    folder.mkdir()
    (folder / "dtctl.yaml").write_text(SPEC)
    (folder / "t.py").write_text("")
    source = random.Random(seed)
    for number in range(files):
        (folder / f"m{number:04d}.py").write_bytes(source.randbytes(4096).hex().encode())
    return folder


def launching(side: Side, folder: Path) -> dict[str, float]:
    """A launch of which the nodes have all the code, after one that brought it."""
    place = project(folder / "p", 20, 0)
    side.launch(place)
    whole, started = side.launch(place)
    return {"launch, as a whole": whole, "launch, until it runs": started}


def pushing(side: Side, folder: Path) -> dict[str, float]:
    """A launch that brings 2,000 files of 8 KiB, and one after a change of one of them."""
    place = project(folder / "p", 2000, time.time_ns())
    first = side.launch(place)[1]
    (place / "m0000.py").write_text(f"# {time.time_ns()}\n")
    return {"push of 2,000 files": first, "push of one": side.launch(place)[1]}


def snapshots(side: Side, folder: Path) -> dict[str, float]:
    """128 MiB saved, and read."""
    found = json.loads(side.python("-c", SNAPSHOT, str(folder / "s"), cwd=folder))
    return {"snapshot, saved": found["save"], "snapshot, read": found["read"]}


def stream(side: Side) -> int:
    """Bytes that a launch sends to each node before it says anything."""
    code = "from dtctl.supervisor import bootstrap; print(len(bootstrap.opening('~/x')))"
    return int(side.python("-c", code, cwd=side.tree))


def compare(sides: dict[str, Side], folder: Path, repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Name of the figure -> side -> seconds."""
    found: dict[str, dict[str, list[float]]] = {}
    for measure in (launching, pushing, snapshots):
        for turn in range(-1, repetitions):  # the first is not counted: caches are cold
            for name in [*sides][:: 1 if turn % 2 else -1]:
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    figures = measure(sides[name], Path(place))
                for figure, seconds in figures.items() if turn >= 0 else ():
                    found.setdefault(figure, {}).setdefault(name, []).append(seconds)
    return found


def main() -> int:
    """Compare, and say so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="99d9278", help="the commit to compare with")
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--busy", action="store_true", help="also on a busy machine; nothing is kept")
    options = parser.parse_args()
    if not options.busy:
        wait_for_quiet()
    commits = {"before": options.before, "after": "HEAD"}
    # Not below /tmp, of which the hosts have their own.
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".dtctl-compare-") as name:
        folder, sides = Path(name), dict[str, Side]()
        try:
            for side, commit in commits.items():
                tree = folder / f"tree-{side}"
                subprocess.run(["git", "worktree", "add", "--detach", "-q", tree, commit], cwd=ROOT, check=True)
                sides[side] = Side(tree, folder / side)
                sides[side].python("-m", "dtctl", "sandbox", "up", "--nodes", "3", cwd=folder)
            found = compare(sides, folder, options.repetitions)
            sizes = {side: stream(one) for side, one in sides.items()}
            hashes = {
                side: subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=one.tree, text=True).strip()
                for side, one in sides.items()
            }
        finally:
            for side in sides.values():
                side.python("-m", "dtctl", "sandbox", "down", cwd=folder)
            for side in commits:
                tree = folder / f"tree-{side}"
                if tree.is_dir():
                    subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    rows = {}
    for figure, both in found.items():
        before, after = (statistics.median(both[side]) for side in ("before", "after"))
        paired = statistics.median(b / a for a, b in zip(both["before"], both["after"], strict=True))
        rows[figure] = {"before_s": round(before, 4), "after_s": round(after, 4), "ratio": round(after / before, 4)}
        rows[figure]["median of ratios"] = round(paired, 4)
        print(f"{figure:<24}{before:>10.4f} s{after:>10.4f} s{after / before:>8.3f}{paired:>8.3f}")
    print(f"sent to each node       {sizes['before']:>10,} B{sizes['after']:>10,} B")
    if options.busy:
        return 0
    machine = f"{platform.machine()}, {platform.release()}, {os.cpu_count()} cores"
    keep(
        "compare",
        {"date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine, "commits": hashes,
         "repetitions": options.repetitions, "figures": rows, "sent_bytes": sizes, "seconds": found},
    )  # fmt: skip
    return 1 if any(row["ratio"] > BAR for row in rows.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
