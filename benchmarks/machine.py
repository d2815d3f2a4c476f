"""What all benchmarks share: whether the machine has time for them, and where figures are kept."""

from __future__ import annotations

import json
import resource
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
MAX_BUSY = 0.08


def busy_share(over_s: float = 2.0) -> float:
    """Share of the machine's CPU time that somebody uses, over a moment in which this program uses none."""

    def look() -> tuple[int, int]:
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    total, idle = look()
    time.sleep(over_s)
    total_now, idle_now = look()
    return 1 - (idle_now - idle) / max(1, total_now - total)


def wait_for_quiet(limit_s: float = 300.0) -> None:
    """Return when the machine has nothing else to do; give up after a while."""
    deadline = time.monotonic() + limit_s
    while (busy := busy_share()) > MAX_BUSY:
        if time.monotonic() > deadline:
            raise SystemExit(f"the machine is busy ({busy:.0%} of its CPU time); figures would mean nothing")


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    wall_s: float
    cpu_s: float
    """Of it and of all that it has waited for."""
    returncode: int
    stdout: str
    stderr: str


def measure_command(argv: Sequence[str], *, env: dict[str, str] | None, cwd: Path, limit_s: float) -> Done:
    """Run a command in a fresh process.

    Raises:
        subprocess.TimeoutExpired: It took longer than `limit_s`.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun_s = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, cwd=cwd, env=env, timeout=limit_s, check=False)
    wall_s = time.perf_counter() - begun_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Done(wall_s, cpu_s, done.returncode, done.stdout, done.stderr)


def read_commit() -> str:
    """Return the commit of this checkout; empty outside one."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def keep(name: str, figures: dict[str, object], into: Path | None = None) -> Path:
    """Write figures and the commit that they are of to a new file, or add them to an existing one."""
    RESULTS.mkdir(exist_ok=True)
    path = into.resolve() if into else RESULTS / f"{name}-{time.strftime('%Y%m%d-%H%M')}.json"
    figures = {"commit": read_commit(), **figures}
    if path.exists() and into:
        kept = json.loads(path.read_text())
        for title, rows in figures.items():
            kept[title] = kept[title] | rows if isinstance(kept.get(title), dict) and isinstance(rows, dict) else rows
        figures = kept
    path.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"\nkept in {path}")
    return path
