"""Draw from the zoo, again and again, and keep what came of it.

python -m tests.fault.zoo                          150 draws, with a seed by the clock that is printed
python -m tests.fault.zoo --draws 10 --seed 7
python -m tests.fault.zoo --only 7-31              one draw again, by the seed that its row has
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from tests.fault.zoo import launched
from tests.fault.zoo.draws import ROOT, as_row, draw
from tests.fault.zoo.models import KINDS

RESULTS = ROOT / "benchmarks" / "results"


def main() -> int:
    """Draw, print, keep; 0 if nothing that was said is false."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=150)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--launches", type=int, default=6, help="further draws that go through `dtctl launch`")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="draw from these only")
    parser.add_argument("--only", help="the seed of one draw, as SEED-NUMBER")
    parser.add_argument("--out", type=Path, help="file for the result; benchmarks/results/zoo-DATE.json if not given")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a draw that went wrong")
    options = parser.parse_args()
    seeds = [f"{options.seed}-{number}" for number in range(options.draws)]
    seeds = [options.only] if options.only else [*seeds, *(f"{options.seed}-L{n}" for n in range(options.launches))]
    print(f"seed {options.seed}, {len(seeds)} draws of {len(KINDS)} kinds", flush=True)
    rows = []
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix="dtctl-zoo-"))
        found = draw(seed, folder, kinds=tuple(options.kind or ()), start=launched.start if "L" in seed else None)
        rows.append(as_row(found))
        print(
            f"{'ok   ' if found.good else 'FALSE'} {seed}  {found.kind}, {found.strategy} on {found.workers}, "
            f"{len(found.kills)} kills, changed: {found.change or 'nothing'}: {found.verdict}  ({found.seconds:.1f} s)",
            flush=True,
        )
        if not found.good:
            print("      said:", found.said, "\n      differing:", found.differing, f"\n      {found.note[-1200:]}")
        if found.good or not options.keep:
            shutil.rmtree(folder)
        else:
            print(f"      kept in {folder}")
    verdicts = Counter(row["verdict"] for row in rows)
    false = sum(not row["good"] for row in rows)
    print(f"{len(rows)} draws, {false} false statements: {dict(verdicts)}")
    if not options.only:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        kept = {
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "machine": f"{platform.machine()}, {platform.release()}, {len(os.sched_getaffinity(0))} cores",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "commit": commit.stdout.strip(),
            },
            "seed": options.seed,
            "kinds": len(KINDS),
            "false statements": false,
            "verdicts": dict(verdicts),
            "draws": rows,
        }
        path = options.out or RESULTS / f"zoo-{time.strftime('%Y%m%d-%H%M')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"kept in {path}")
    return int(bool(false))


if __name__ == "__main__":
    raise SystemExit(main())
