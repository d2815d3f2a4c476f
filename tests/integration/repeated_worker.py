"""Trains cases of the equality table, and resumes from the snapshot in their middle; run by test_repeated.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtctl.runtime import start
from dtctl.runtime.console import say
from dtctl.runtime.snapshot.format import layout
from tests.integration.equality_worker import Case, trainer_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path, help="JSON: a list of cases")
    parser.add_argument("changes", type=Path, help="JSON: a list of settings that further resumes have instead")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    changes = json.loads(args.changes.read_text())
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
            for number, change in enumerate([{}, *changes]):
                if worker.is_first:
                    for step, path in layout.list_step_folders(snapshots):
                        if step > 1:
                            shutil.rmtree(path)
                    say(f"change {number}" if number else f"case {case.key()}")
                worker.barrier()
                changed = dataclasses.replace(placed, settings=merge(settings, change))
                trainer_of(changed, worker, folder, snapshots).run()


def merge(settings: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with a change; groups are merged."""
    return {**settings, **{k: {**settings.get(k, {}), **v} if isinstance(v, dict) else v for k, v in change.items()}}


if __name__ == "__main__":
    main()
