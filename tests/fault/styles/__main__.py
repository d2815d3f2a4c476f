"""Trainings of other styles than one model with one loss: each on 1 and 2 workers and on 2 x 2, and killed.

python -m tests.fault.styles                              all, with 4 workers on this machine in place of 2 x 2
python -m tests.fault.styles --only gan --only lora
python -m tests.fault.styles --hosts                      2 x 2: two virtual hosts of a sandbox with two workers each
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from tests.fault.styles.measure import PROGRAMS, ROOT, examine
from tests.fault.styles.on_hosts import HostPair


def main() -> int:
    """Measure, print the table, and keep it; 0 if every figure is as the page claims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(PROGRAMS), help="measure these alone")
    parser.add_argument("--kills", type=int, default=3, help="kill -9 of each program")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments of the kills")
    parser.add_argument("--hosts", action="store_true", help="2 x 2 through `dtctl launch` on two virtual hosts")
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    rows = []
    with HostPair() if options.hosts else open(os.devnull) as hosts:
        for name in options.only or PROGRAMS:
            with tempfile.TemporaryDirectory(prefix="dtctl-styles-") as folder:
                row = examine(
                    name,
                    Path(folder),
                    kills=options.kills,
                    seed=options.seed,
                    hosts=hosts if isinstance(hosts, HostPair) else None,
                )
            rows.append(row)
            print(json.dumps(row), flush=True)
    bad = [row["program"] for row in rows if not row["good"]]
    print(f"{len(rows)} programs, seed {options.seed}, not as expected: {', '.join(bad) or 'none'}")
    if options.out:
        document = {
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "versions": {
                "python": platform.python_version(), "torch": torch.__version__, "commit": commit.stdout.strip(),
            },
            "seed": options.seed,
            "rows": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
