"""Workers that leave out different parameters, or whole blocks, train what one process trains, with every strategy.

What no worker uses in a step has no gradient: an optimizer with momentum and weight decay tells that from a zero.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dtctl.runtime.snapshot import load, read
from dtctl.runtime.snapshot.format import layout
from tests import forked
from tests.integration.unused_worker import Case, written

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WORKER = Path(__file__).with_name("unused_worker.py")
LIMIT = 1e-9
FIND_KEY = "train.ddp.find_unused_parameters"
FIND = {"ddp": {"find_unused_parameters": True}}
ACCUMULATED: dict[str, Any] = {"accumulate": 2}
CASES: dict[int, list[Case]] = {
    2: [
        *(
            Case(model=model, settings={"strategy": "fsdp"})
            for model in ("mixture", "sizes", "frozen", "tied", "experts", "raw", "exit", "again", "backward", "tokens")
        ),
        Case(model="mixture", settings={"strategy": "fsdp", **ACCUMULATED}),
        Case(model="experts", settings={"strategy": "fsdp", **ACCUMULATED}),
        Case(model="experts", settings={"strategy": "fsdp", "fsdp": {"reshard_after_forward": False}}),
        Case(model="mixture", settings={"strategy": "fsdp"}, common={"checkpointing": "full"}),
        Case(model="experts", settings={"strategy": "fsdp"}, common={"checkpointing": "full"}),
        Case(model="mixture", settings={"strategy": "fsdp"}, common={"checkpointing": "selective"}),
        Case(model="experts", settings={"strategy": "fsdp"}, common={"compile": "eager"}),
        *(
            Case(model=model, settings={"strategy": strategy, **FIND, **more})
            for strategy in ("ddp", "zero1")
            for model in ("mixture", "experts")
            for more in ({}, ACCUMULATED)
        ),
        Case(model="mixture", settings={"strategy": "ddp", **FIND}, common={"checkpointing": "full"}),
        Case(model="tied", settings={"strategy": "ddp", **FIND}),
        Case(model="frozen", settings={"strategy": "zero1", **FIND}),
        Case(model="mixture", settings={"strategy": "tp"}),
        Case(model="tokens", settings={"strategy": {"cp": 2}}),
        *(
            Case(model="deep", settings={"strategy": "pipeline", "pipeline": {"schedule": schedule}})
            for schedule in ("1f1b", "interleaved", "zbv")
        ),
        *(
            Case(model=model, settings={"exact": "elastic", "micro_batch": 1, **more})
            for model in ("mixture", "experts")
            for more in ({}, ACCUMULATED)
        ),
    ],
    4: [
        Case(model="mixture", settings={"strategy": {"dp": 2, "fsdp": 2}}),
        Case(model="experts", settings={"strategy": {"dp": 2, "fsdp": 2}}),
        Case(model="exit", settings={"strategy": "fsdp"}),
        Case(model="mixture", settings={"strategy": {"fsdp": 2, "tp": 2}}),
        Case(model="mixture", settings={"strategy": {"dp": 2, "tp": 2}}),
        Case(model="mixture", settings={"strategy": {"fsdp": 2, "pp": 2}, **ACCUMULATED}),
        Case(model="mixture", settings={"strategy": {"dp": 2, "pp": 2}, **ACCUMULATED}),
        Case(model="tokens", settings={"strategy": {"fsdp": 2, "cp": 2}}),
    ],
}
ALL = [(workers, case) for workers, cases in CASES.items() for case in cases]


def single(case: Case) -> Case:
    return replace(case, settings={})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {workers: tmp_path_factory.mktemp(f"workers-{workers}") for workers in (1, *CASES)}
    singles = {single(case).key(): single(case) for _, case in ALL}
    for workers, folder in folders.items():
        written(CASES.get(workers, list(singles.values())), folder / "cases.json")
        ended = forked.launch([WORKER, folder / "cases.json", folder], workers, cwd=folder)
        (folder / "output").write_text(ended.output)
    return folders


def apart(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one.double() - two.double()).abs().max() / one.double().abs().max().clamp(min=1e-30))


def optimizer_state(folder: Path) -> dict[str, torch.Tensor]:
    ((_, newest), *_) = layout.list_step_folders(folder / "snapshots")
    tree = load.load(read.verify_snapshot(newest))["optimizer"]["state"]
    return {f"{name}.{key}": value for name, values in tree.items() for key, value in values.items()}


@pytest.mark.parametrize(("workers", "case"), ALL, ids=[f"{workers}-{case.key()}" for workers, case in ALL])
def test_what_is_left_out_changes_nothing(trained: dict[int, Path], workers: int, case: Case) -> None:
    folder, alone = trained[workers] / case.key(), trained[1] / single(case).key()
    assert (folder / "result.pt").exists(), (trained[workers] / "output").read_text()[-6000:]
    found, expected = torch.load(folder / "result.pt"), torch.load(alone / "result.pt")
    assert apart(expected["losses"], found["losses"]) < LIMIT, (expected["losses"], found["losses"])
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert apart(value, found["weights"][name]) < LIMIT, name
    # The same parameters have a state, and took as many steps: those without a gradient are left alone.
    states, own = optimizer_state(alone), optimizer_state(folder)
    assert own.keys() == states.keys()
    for name, value in states.items():
        assert apart(value, own[name]) < 1e3 * LIMIT, name
    if case.model in ("mixture", "deep", "tied", "sizes"):
        assert not any(name.startswith("never.") for name in states)


ERRORS: list[tuple[Case, str, str]] = [
    # In the first step: known to all workers, with the names.
    (Case(model="mixture", settings={"strategy": "ddp"}), "blocks.0.experts.0.up", FIND_KEY),
    (
        Case(model="mixture", settings={"strategy": "ddp", **ACCUMULATED}),
        "blocks.0.experts",
        "train.ddp.find_unused_parameters",
    ),
    (Case(model="mixture", settings={"strategy": "zero1"}), "blocks.0.experts", FIND_KEY),
    # Used in the first step, and no more later; and the other way round.
    (Case(model="later", settings={"strategy": "ddp"}), "second.weight", FIND_KEY),
    (
        Case(model="later", settings={"strategy": "ddp", "ddp": {"static_graph": True}}),
        "second.weight",
        "train.ddp.static_graph",
    ),
    (
        Case(model="sooner", settings={"strategy": "ddp", "ddp": {"static_graph": True}}),
        "static_graph requires the same ones",
        "train.ddp.static_graph",
    ),
    # torch before 2.13 cannot let them take part with zeros.
    (Case(model="before 2.13", settings={"strategy": "fsdp"}), "even.weight, even.bias, odd", "train.strategy"),
    (Case(model="scalar", settings={"strategy": "fsdp"}), "zero-dimensional", "train.strategy"),
    (Case(model="formats", settings={"strategy": "fsdp"}), "several number formats", "train.strategy"),
    (
        Case(model="dense", settings={"strategy": "tp", "tp": {"plan": {"blocks.*.up": "colwise"}}}),
        "has other results",
        "train.tp.plan",
    ),
    (
        Case(model="dense", settings={"strategy": "tp", "tp": {"plan": {"blocks.*.down": "rowwise"}}}),
        "has other results",
        "train.tp.plan",
    ),
]


@pytest.mark.parametrize(("case", "said", "key"), ERRORS, ids=[case.key() for case, *_ in ERRORS])
def test_what_a_key_resolves_is_said_with_the_key_on_every_worker(
    tmp_path: Path, case: Case, said: str, key: str
) -> None:
    written([case], tmp_path / "cases.json")
    ended = forked.launch([WORKER, tmp_path / "cases.json", tmp_path], 2, cwd=tmp_path)
    told = [line for line in ended.output.splitlines() if line.startswith("told ")]
    assert len(told) == 2, ended.output
    assert all(said in line and key in line for line in told), told
    taken = layout.list_step_folders(tmp_path / case.key() / "snapshots")
    assert not taken, "a step was taken with gradients of one worker alone"
