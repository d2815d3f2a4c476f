"""What all benchmarks share: whether the machine has time for them, and where figures are kept."""

from __future__ import annotations

import json
import time
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


def keep(name: str, figures: dict[str, object], into: Path | None = None) -> Path:
    """Write figures to a file of this minute, or beside those of a file of before, and say where."""
    RESULTS.mkdir(exist_ok=True)
    path = into.resolve() if into else RESULTS / f"{name}-{time.strftime('%Y%m%d-%H%M')}.json"
    if path.exists() and into:
        kept = json.loads(path.read_text())
        for title, rows in figures.items():
            kept[title] = kept[title] | rows if isinstance(kept.get(title), dict) and isinstance(rows, dict) else rows
        figures = kept
    path.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"\nkept in {path}")
    return path
