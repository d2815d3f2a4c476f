"""Every strategy trains what one process trains: the same losses, gradient norms, weights and optimizer state.

Each number of workers is started once and trains all its cases (equality_worker.py). With DTCTL_EQUALITY=FILE the
differences are written there as JSON; equality_table.py makes docs/equality.md of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dtctl.runtime.snapshot import load, read, state, state_sum
from dtctl.runtime.snapshot.format import layout
from tests import forked
from tests.integration.equality_worker import Case, written

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WORKER = Path(__file__).with_name("equality_worker.py")

LIMITS = {
    ("sgd", "float64"): 1e-12,
    ("sgd", "float32"): 1e-5,
    ("adamw", "float64"): 1e-8,
    # A gradient near zero decides by its rounding which way AdamW goes: lr times its relative error.
    ("adamw", "float32"): 1e-3,
    # In bf16 inside, which a gradient that is the same but for its last bit almost never changes.
    ("muon", "float64"): 1e-8,
}
"""Largest relative difference from one process, of each tensor against its largest entry."""

MIXTURE_LIMITS = LIMITS | {("sgd", "float64"): 1e-14, ("adamw", "float64"): 1e-12}
"""Where experts are divided, whose tokens are sent and not rounded."""

ROUNDED = {"bf16": 3e-2, "fp16": 3e-3, "powersgd": 1e-1}
"""And where gradients are rounded on the wire, or all of the computation is; PowerSGD approximates them."""

Meshes = list[tuple[Any, dict[str, Any]]]

MESHES: dict[int, Meshes] = {
    2: [
        ("ddp", {}),
        ("ddp", {"ddp": {"static_graph": True}}),
        ("ddp", {"ddp": {"find_unused_parameters": True}}),
        ("ddp", {"ddp": {"comm_hook": "bf16"}}),
        ("ddp", {"ddp": {"comm_hook": "fp16"}}),
        ("ddp", {"ddp": {"comm_hook": "powersgd"}}),
        ("ddp", {"shares": {"node1": 3}}),
        ("zero1", {}),
        ("fsdp", {}),
        ("fsdp", {"shares": {"node0": 3}}),
        ("fsdp", {"fsdp": {"reduce_dtype": "bf16"}}),
        ("fsdp", {"fsdp": {"reshard_after_forward": False}}),
        ("tp", {}),
        ("tp", {"tp": {"sequence_parallel": True}}),
        ({"cp": 2}, {}),
        ("pipeline", {}),
        ("pipeline", {"pipeline": {"schedule": "gpipe"}}),
        ("pipeline", {"pipeline": {"schedule": "interleaved"}}),
        ("pipeline", {"pipeline": {"schedule": "zero-bubble"}}),
        ("pipeline", {"pipeline": {"schedule": "zbv"}}),
    ],
    4: [
        ("ddp", {}),
        ("zero1", {}),
        ("fsdp", {}),
        ("tp", {}),
        ({"dp": 2, "fsdp": 2}, {}),
        ({"dp": 2, "tp": 2}, {}),
        ({"fsdp": 2, "tp": 2}, {}),
        ({"fsdp": 2, "tp": 2}, {"shares": {"node0": 3, "node1": 3}}),
        ({"fsdp": 2, "tp": 2}, {"tp": {"sequence_parallel": True}}),
        ({"fsdp": 2, "cp": 2}, {}),
        ({"dp": 2, "cp": 2}, {}),
        ({"cp": 2, "tp": 2}, {}),
        ("pipeline", {"pipeline": {"split": [1, 1, 1, 1]}}),
        ("pipeline", {"pipeline": {"schedule": "zero-bubble", "stages_per_worker": 1}}),
        ({"dp": 2, "pp": 2}, {}),
        ({"dp": 2, "pp": 2}, {"pipeline": {"schedule": "interleaved"}}),
        ({"dp": 2, "pp": 2}, {"pipeline": {"schedule": "zbv"}}),
        ({"fsdp": 2, "pp": 2}, {}),
        ({"fsdp": 2, "pp": 2}, {"pipeline": {"schedule": "interleaved"}}),
        ({"tp": 2, "pp": 2}, {}),
    ],
    8: [],
}
EXTRAS: dict[int, list[tuple[Case, list[Any]]]] = {
    2: [
        # Averaged weights, blocks that are computed twice, a loss that weighs tokens.
        (
            Case(common={"ema": {"decay": 0.6}, "data": {"tokens": True}, "checkpointing": "full"}),
            ["ddp", "zero1", "fsdp", "tp", {"cp": 2}, "pipeline", ("pipeline", "zbv")],
        ),
        (Case(dtype="float32", common={"precision": "fp16"}), ["ddp", "fsdp", "tp", "pipeline"]),
        # Matrices that are put together for the optimizer's step.
        (Case(optimizer="muon"), ["ddp", "zero1", "fsdp"]),
        # A function that makes the model, which the second worker builds on the meta device.
        (Case(common={"data": {"function": True}}), ["fsdp"]),
        # Each size of a batch, and each way of computing, is compiled by itself.
        (Case(common={"compile": "eager", "data": {"brief": True}}), ["ddp", "fsdp", "pipeline"]),
        # A model with experts: dropped tokens, shared ones, such without a token, losses and a bias that balance.
        (Case(common={"data": {"mixture": "own"}}), ["ddp", {"ep": 2}]),
        (Case(optimizer="adamw", common={"data": {"mixture": "own"}}), [{"ep": 2}]),
        (Case(common={"data": {"mixture": "layouts"}}), [{"ep": 2}]),
        (
            Case(common={"data": {"mixture": "own", "tokens": True}, "ema": {"decay": 0.6}, "checkpointing": "full"}),
            [{"ep": 2}],
        ),
        *(
            (Case(dtype="float32", common={"data": {"mixture": "own"}, "precision": precision}), [{"ep": 2}])
            for precision in ("fp16", "bf16")
        ),
        (Case(common={"data": {"mixture": "own", "brief": True}, "compile": "eager"}), [{"ep": 2}]),
    ],
    4: [
        (
            Case(common={"ema": {"decay": 0.6}, "data": {"tokens": True}}),
            [{"fsdp": 2, "tp": 2}, {"fsdp": 2, "pp": 2}],
        ),
        (
            Case(common={"data": {"mixture": "own"}}),
            [{other: 2, "ep": 2} for other in ("dp", "fsdp", "cp", "tp", "pp")],
        ),
        (Case(optimizer="adamw", common={"data": {"mixture": "layouts"}}), [{"fsdp": 2, "ep": 2}]),
        (Case(optimizer="muon"), [{"dp": 2, "fsdp": 2}, {"fsdp": 2, "tp": 2}]),
        (Case(common={"data": {"mixture": "layouts"}}), [{"tp": 2, "ep": 2}]),
    ],
    8: [(Case(common={"data": {"mixture": "own"}}), [{"dp": 2, "fsdp": 2, "ep": 2}])],
}
"""What else must not depend on the strategy."""
BRIEF = {"ddp", "fsdp"}
"""Strategies whose fp32 cases are run; the others differ from them in exchanges, not in arithmetic."""
SHARDED = ("zero1", {"dp": 2, "fsdp": 2}, {"fsdp": 2, "tp": 2})
"""Strategies on 4 workers whose AdamW is run: those that cut its state otherwise than 2 workers do."""


def cases_of(workers: int) -> list[Case]:
    """All cases for a number of workers."""
    found = []
    for case, strategies in EXTRAS[workers]:
        for strategy in strategies:
            name, *schedule = strategy if isinstance(strategy, tuple) else (strategy,)
            options = {"pipeline": {"schedule": schedule[0]}} if schedule else {}
            found.append(with_strategy(case, {"strategy": name, **options}))
    for strategy, options in MESHES[workers]:
        settings = {"strategy": strategy, **options}
        found.append(with_strategy(Case(), settings))
        if not options and (workers == 2 or strategy in SHARDED):
            found.append(with_strategy(Case(optimizer="adamw"), settings))
            if str(strategy) in BRIEF and workers == 2:
                found += [with_strategy(Case(dtype="float32", optimizer=name), settings) for name in ("sgd", "adamw")]
    return found


def with_strategy(case: Case, settings: dict[str, Any]) -> Case:
    """The case; a pipeline has more layers, and more micro batches, than it has stages."""
    if "pipeline" not in settings["strategy"] and "pp" not in settings["strategy"]:
        return replace(case, settings=settings)
    return replace(case, settings={"accumulate": 4, **settings}, layers=4)


ALL = [(workers, case) for workers in MESHES for case in cases_of(workers)]
ALONE = list({case.alone().key(): case.alone() for _, case in ALL}.values())
"""What the others are compared with."""
TOGETHER = 8
"""Cases that the same processes train. Each leaves groups, whose threads look around a hundred times a second."""


def limit_of(case: Case) -> float:
    if "precision" in case.common:
        return ROUNDED[case.common["precision"]]
    words = [*case.settings.get("ddp", {}).values(), *case.settings.get("fsdp", {}).values()]
    limits = MIXTURE_LIMITS if "mixture" in case.common.get("data", {}) else LIMITS
    return next((ROUNDED[str(word)] for word in words if str(word) in ROUNDED), limits[case.optimizer, case.dtype])


def run(workers: int, folder: Path, base: Path) -> None:
    """Train all cases of a number of workers."""
    cases = ALONE if workers == 1 else cases_of(workers)
    argv = [WORKER, folder / "cases.json", folder, base]
    with (folder / "output").open("w") as output:
        for first in range(0, len(cases), TOGETHER):
            written(cases[first : first + TOGETHER], folder / "cases.json")
            output.write(forked.launch(argv, workers, cwd=folder).output)


class Trained(dict[int, Path]):
    """Folders by the number of workers; the first test that wants one has its cases trained, within its time."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, workers: int) -> Path:
        folder = self._factory.mktemp(f"workers-{workers}")
        run(workers, folder, folder if workers == 1 else self[1])
        self[workers] = folder
        return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folders = Trained(tmp_path_factory)
    yield folders
    if os.environ.get("DTCTL_EQUALITY"):
        rows = [
            {
                "workers": workers,
                "strategy": case.settings["strategy"],
                "options": {key: case.settings[key] for key in case.settings if key not in ("strategy", "accumulate")}
                | dict(case.common),
                "optimizer": case.optimizer,
                "dtype": case.dtype,
                "limit": limit_of(case),
                "digest": digest(folders[workers] / case.key() / "snapshots"),
                **differences(folders[workers] / case.key(), folders[1] / case.alone().key()),
            }
            for workers, case in ALL
        ]
        Path(os.environ["DTCTL_EQUALITY"]).write_text(json.dumps({"torch": torch.__version__, "cases": rows}, indent=1))


def parts(folder: Path) -> dict[str, Any]:
    ((_, newest), *_) = layout.list_step_folders(folder)
    return load.load(read.verify_snapshot(newest))


def digest(folder: Path) -> str:
    found = parts(folder)
    return state.compute_state_digest(found["model"], found["optimizer"])


def state_sum_of(folder: Path) -> str:
    ((_, newest), *_) = layout.list_step_folders(folder)
    manifest = read.verify_commit_record(newest).manifest
    assert manifest is not None
    return str(manifest.facts[state_sum.FACT])


def apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    assert one.shape == two.shape
    assert one.dtype == two.dtype
    return float((one.double() - two.double()).abs().max() / two.double().abs().max().clamp(min=1e-12))


def differences(found: Path, expected: Path) -> dict[str, float]:
    one, two = torch.load(found / "result.pt"), torch.load(expected / "result.pt")
    assert one["weights"].keys() == two["weights"].keys()
    kept = [parts(path / "snapshots") for path in (found, expected)]
    states = [dict(state.iter_named_tensors([one["optimizer"]["state"], one.get("ema", {})])) for one in kept]
    assert states[0].keys() == states[1].keys()
    return {
        "losses": apart(one["losses"], two["losses"]),
        "weights": max(apart(one["weights"][name], value) for name, value in two["weights"].items()),
        "optimizer_state": max(apart(states[0][name], value) for name, value in states[1].items()),
    }


@pytest.mark.parametrize(("workers", "case"), ALL, ids=[f"{workers}-{case.key()}" for workers, case in ALL])
def test_a_strategy_trains_what_one_process_trains(trained: Trained, workers: int, case: Case) -> None:
    folder = trained[workers] / case.key()
    assert (folder / "taken").is_dir(), (trained[workers] / "output").read_text()[-6000:]
    single_folder = trained[1] / case.alone().key()
    losses = torch.load(single_folder / "result.pt")["losses"]
    assert losses[-1, 0] < losses[0, 0], "nothing was learnt, so nothing is compared"
    limit = limit_of(case)
    found = differences(folder, single_folder)
    assert max(found["losses"], found["weights"]) <= limit, found
    assert found["optimizer_state"] <= 1e3 * limit, found
    # A snapshot holds all there is, and can be taken by any other strategy.
    assert digest(folder / "again") == digest(folder / "snapshots")
    assert digest(folder / "taken") == digest(single_folder / "snapshots")
    # So does the sum by which a resume sees that the state was loaded as it was saved, however it is divided.
    assert state_sum_of(folder / "again") == state_sum_of(folder / "snapshots")
    assert state_sum_of(folder / "taken") == state_sum_of(single_folder / "snapshots")
    assert "the state that was loaded differs" not in (trained[workers] / "output").read_text()
