"""Unequal workers: who takes how much of a batch, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtctl import names
from dtctl.errors import PlanError, SpecError
from dtctl.runtime.data_loading import shares
from dtctl.runtime.data_loading.shares import compute_replica_shares, gather_shares
from dtctl.runtime.distributed.worker import resolve_worker_from_env
from dtctl.train.batch import BatchSizes, compute_batch_sizes
from dtctl.train.compatibility import require
from dtctl.train.config import TrainConfig, load
from dtctl.train.mesh import Degrees

FACTS = [["NVIDIA H100 80GB HBM3", "a"], ["NVIDIA A100-SXM4-80GB", "b"], ["NVIDIA A100-SXM4-80GB", "c"]]


def config(**values: object) -> TrainConfig:
    return load(values, argv=[], environ={})


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [({}, []), ({"H100": 2}, [2, 1, 1]), ({"h100": 3, "c": 2}, [3, 1, 2]), ({"A100": 2, "b": 2}, [1, 2, 2])],
)
def test_shares_follow_from_the_names_of_gpus_and_nodes(
    wanted: dict[str, int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "gather_json", lambda _value, _worker: FACTS)
    assert gather_shares(config(shares=wanted), resolve_worker_from_env({})) == expected


@pytest.mark.parametrize("wanted", [{"H200": 2}, {"A100": 2, "b": 3}])
def test_a_share_of_nobody_or_two_shares_of_one_are_refused(
    wanted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "gather_json", lambda _value, _worker: FACTS)
    with pytest.raises(PlanError) as refused:
        gather_shares(config(shares=wanted), resolve_worker_from_env({}))
    assert refused.value.where == "train.shares"


def test_after_a_restart_the_nodes_may_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "gather_json", lambda _value, _worker: FACTS)
    monkeypatch.setenv(names.ATTEMPT, "1")
    assert gather_shares(config(shares={"H200": 2, "c": 3}), resolve_worker_from_env({})) == [1, 1, 3]


def test_one_process_knows_its_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(names.NODE, "here")
    assert gather_shares(config(shares={"here": 2}), resolve_worker_from_env({})) == [2]


def test_workers_of_one_part_of_a_batch_have_one_share() -> None:
    mesh = Degrees(fsdp=2, tp=2)
    assert compute_replica_shares([3, 3, 1, 1], mesh) == (3, 1)
    with pytest.raises(PlanError):
        compute_replica_shares([3, 1, 3, 1], mesh)


def test_a_global_batch_is_divided_by_shares() -> None:
    assert compute_batch_sizes(config(global_batch=24, accumulate=2), 2, shares=(3, 1)) == BatchSizes(
        micro=3, accumulate=2, world_size=2, shares=(3, 1)
    )
    assert compute_batch_sizes(config(micro_batch=4), 2, shares=(3, 1)).total == 16
    with pytest.raises(PlanError):
        compute_batch_sizes(config(global_batch=18), 2, shares=(3, 1))


def test_what_does_not_go_with_shares_is_refused() -> None:
    with pytest.raises(PlanError):
        require(config(shares={"a": 2}, strategy="pipeline"), Degrees(pp=2), accumulate=4)
    with pytest.raises(SpecError):
        config(shares={"a": 0})
