"""Trains cases of the equality table, and goes on from the snapshot in their middle; run by test_repeated.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

from dtctl.runtime import start
from dtctl.runtime.console import say
from dtctl.runtime.snapshot.format import layout
from tests.integration.equality_worker import Case, trainer_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path, help="JSON: a list of cases")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    cases = [Case(**values) for values in json.loads(args.cases.read_text())]
    with start(timeout_s=60.0) as worker:
        for case in cases:
            folder = args.folder / case.key()
            snapshots = folder / "snapshots"
            settings = {**case.settings, "snapshot": {**case.settings["snapshot"], "dir": str(snapshots)}}
            placed = dataclasses.replace(case, settings=settings)
            if worker.is_first:
                folder.mkdir(parents=True)
            worker.barrier()
            trainer_of(placed, worker, folder, snapshots).run()
            if worker.is_first:
                for step, path in layout.listing(snapshots):
                    if step > 1:
                        shutil.rmtree(path)
                say(f"case {case.key()}")
            worker.barrier()
            trainer_of(placed, worker, folder, snapshots).run()


if __name__ == "__main__":
    main()
