"""Score what is said of a resume on programs as people write them.

python -m tests.fault.programs --part learn                 those that may be learned from
python -m tests.fault.programs --part held-out --out FILE   those that are a score, once
python -m tests.fault.programs --only ema_shadow_dict --keep
python -m tests.fault.programs --draws 300                  programs and changes that are drawn, instead
python -m tests.fault.programs --draws 300 --seed 7 --only 7-031 --keep
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from tests.fault.programs.drawn import MISSES, as_table, draws, rate
from tests.fault.programs.judged import BROKEN, DRAWN, FALSE, LATER, NEEDLESS, ROOT, Judged, judge_in, programs

PARTS = ("learn", "held-out", "later", DRAWN)
SPLIT = "held out: the first byte of the SHA-256 of the program's name is 128 or more; later: written after both"


def main() -> int:
    """Run, print, keep; 0 if no statement was false."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="only these; all if not given")
    parser.add_argument("--only", action="append", help="this program")
    parser.add_argument("--draws", type=int, default=0, help="so many of drawn.py, instead of those of `scripts/`")
    parser.add_argument("--first", type=int, default=0, help="begin with this one of the draws")
    parser.add_argument("--seed", default=str(int(time.time())), help="of what is drawn; by the clock if not given")
    parser.add_argument("--out", type=Path, help="file for the result, beside what it has under other names")
    parser.add_argument("--name", default="all", help="what the result is called in the file")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    parser.add_argument("--keep", action="store_true", help="keep the folders, and say where they are")
    options = parser.parse_args()
    chosen = [
        program
        for program in (draws(options.seed, options.draws)[options.first :] if options.draws else programs())
        if (program.name in options.only if options.only else options.part in (None, program.part))
    ]
    began_s = time.monotonic()
    rows: list[Judged] = []
    folder = Path(tempfile.mkdtemp(prefix="dtctl-programs-"))
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=spawned) as pool:
        for found in pool.map(judge_in, chosen, [folder] * len(chosen), [options.keep] * len(chosen)):
            for row in found:
                rows.append(row)
                name = f"{row.program}{f' + {row.change}' if row.change else ''}"
                print(f"{row.verdict:28} {name}  ({row.seconds:.1f} s)  {row.said[:300]}", flush=True)
                if row.note:
                    print(f"      {row.note[-1500:]}")
            if options.out:  # whoever ends it has what was found until then
                _write(options.out, options.name, rows, time.monotonic() - began_s)
    if options.draws:
        print(f"seed {options.seed}\n{as_table(rows)}")
        for row in rows:
            if rate(row) in MISSES:
                print(f"MISS {rate(row)}: {row.program} {row.change}: {row.kind}; {row.said}")
    for half, score in _scores(rows).items():
        print(half, score)
    if options.keep:
        print(f"kept in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return int(any(row.verdict == FALSE or (row.part == DRAWN and rate(row) in MISSES) for row in rows))


def _write(path: Path, name: str, rows: list[Judged], seconds: float) -> None:
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[name] = _result(rows, _scores(rows), seconds)
    path.write_text(json.dumps(kept, indent=1) + "\n")


def _scores(rows: list[Judged]) -> dict[str, dict[str, object]]:
    return {part: _score([row for row in rows if row.part == part]) for part in PARTS}


def _score(rows: list[Judged]) -> dict[str, object]:
    said = Counter("exact" if row.said == "exact" else "not exact" if row.said else "nothing" for row in rows)
    return {
        "programs": len({row.program for row in rows}),
        "cases": len(rows),
        "false exact": sum(row.verdict == FALSE for row in rows),
        "differs later": sum(row.verdict == LATER for row in rows),
        "needless": sum(row.verdict in NEEDLESS for row in rows),
        "failed": sum(row.verdict.split(",")[0] in (*BROKEN, "left alone failed") for row in rows),
        "right": sum(row.verdict.startswith("right") for row in rows),
        "said": dict(said),
        "kind": dict(Counter(row.kind if row.kind in ("", "right") else "wrong" for row in rows)),
    }


def _result(rows: list[Judged], scores: dict[str, dict[str, object]], seconds: float) -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{platform.machine()}, {platform.release()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "commit": commit.stdout.strip(),
        },
        "split": SPLIT,
        "drawn": dict(Counter(rate(row) for row in rows if row.part == DRAWN)),
        "seconds": round(seconds),
        "scores": scores,
        "cases": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    raise SystemExit(main())
