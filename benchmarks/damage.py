"""Who notices a damaged file: one flipped bit, a cut end, a missing file, at random places.

    python benchmarks/damage.py                 100 places of each kind; half a minute

Every program saves the same state, and loads it again after each damage. "Noticed" is an error, "harmless" the right
values all the same, "SILENT" other values without a word. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from machine import HERE, keep

from dtctl.runtime import Worker
from dtctl.runtime.snapshot import load, read, write
from dtctl.runtime.snapshot.distributed_saver import DistributedSaver

sys.path.insert(0, str(HERE.parent))
from tests.damage import hurt
from tests.unit.runtime.snapshot.gang import gang

State = dict[str, torch.Tensor]
Program = tuple[Callable[[State, Path], object], Callable[[State, Path], State]]


def state() -> State:
    """A small state; most of its bytes are numbers, as in any."""
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{index}": torch.randn(64, 64, generator=generator) for index in range(8)}


def _load_ours(_: State, folder: Path) -> State:
    good, rejected = read.find_newest_good(folder)
    if good is None or rejected:
        raise ValueError(f"passed over: {rejected}")
    loaded: State = load.load(good)["model"]
    return loaded


def _save_sharded(state: State, folder: Path) -> None:
    """By two workers, each half of it."""

    def save(worker: Worker) -> None:
        with DistributedSaver(folder, worker, keep=1) as saver:
            saver.save(1, {"model": state}, facts={})

    gang(2, folder.parent, save)


def _load_dcp(like: State, folder: Path) -> State:
    targets = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp.load(targets, checkpoint_id=folder / "dcp", no_dist=True)
    return targets


def programs() -> dict[str, Program]:
    """Name -> how it saves and loads."""
    found: dict[str, Program] = {
        "dtctl": (
            lambda state, folder: write.save_snapshot_parts(folder, 1, {"model": state}, facts={}, keep=1),
            _load_ours,
        ),
        "dtctl, sharded": (_save_sharded, _load_ours),
        "torch.load": (
            lambda state, folder: torch.save(state, folder / "state.pt"),
            lambda _, folder: torch.load(folder / "state.pt", weights_only=True),
        ),
        "dcp.load": (lambda state, folder: dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True), _load_dcp),
    }
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        return found
    found |= {
        "safetensors": (
            lambda state, folder: save_file(state, folder / "state.safetensors"),
            lambda _, folder: load_file(folder / "state.safetensors"),
        )
    }
    try:
        from torchsnapshot import Snapshot, StateDict
    except ImportError:
        return found

    def restore(like: State, folder: Path) -> State:
        holder = StateDict(**{name: torch.zeros_like(tensor) for name, tensor in like.items()})
        Snapshot(str(folder / "torchsnapshot")).restore({"state": holder})
        return dict(holder)

    def take(state: State, folder: Path) -> object:
        return Snapshot.take(str(folder / "torchsnapshot"), {"state": StateDict(**state)})

    return found | {"torchsnapshot": (take, restore)}


def outcome(program: Program, expected: State, folder: Path) -> str:
    """What came of a load."""
    try:
        loaded = program[1](expected, folder)
    except (Exception, dcp.CheckpointException):  # noqa: BLE001  # any error is a notice
        return "noticed"
    same = loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)
    return "harmless" if same else "SILENT"


def main() -> None:
    """Damage, count, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=100)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable()  # DCP tells of each of its attempts at length
    expected, kept = state(), {}
    print(f"{'':14}{'flip':>34}{'truncate':>34}{'delete':>34}")
    for name, program in programs().items():
        source, row = random.Random(7), {}
        with tempfile.TemporaryDirectory() as temporary:
            whole = Path(temporary, "whole")
            whole.mkdir()
            program[0](expected, whole)
            for kind in ("flip", "truncate", "delete"):
                counts: Counter[str] = Counter()
                for _ in range(options.places):
                    copy = Path(temporary, "copy")
                    shutil.copytree(whole, copy)
                    hurt(kind, copy, source)
                    counts[outcome(program, expected, copy)] += 1
                    shutil.rmtree(copy)
                row[kind] = dict(counts)
        kept[name] = row
        cells = [", ".join(f"{what} {count}" for what, count in sorted(row[kind].items())) for kind in row]
        print(f"{name:14}" + "".join(f"{cell:>34}" for cell in cells), flush=True)
    keep(
        "damage",
        {"date": time.strftime("%Y-%m-%d %H:%M"), "torch": torch.__version__, "places": options.places}
        | {"programs": kept},
    )


if __name__ == "__main__":
    main()
