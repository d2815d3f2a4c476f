"""Settings of a pipeline that do not go together are refused before anything waits for anything."""

from __future__ import annotations

from typing import Any

import pytest

from dtctl.errors import PlanError
from dtctl.runtime.config import batch, load
from dtctl.runtime.mesh import Degrees
from dtctl.runtime.strategies.pipeline import check, owners


@pytest.mark.parametrize(
    ("settings", "degrees", "micro_batches", "message"),
    [
        ({"schedule": "1f1b", "stages_per_worker": 2}, Degrees(pp=2), 4, "has one stage per worker"),
        ({"schedule": "zbv", "stages_per_worker": 3}, Degrees(pp=2), 4, "has two stages per worker"),
        ({"schedule": "zbv"}, Degrees(pp=2, fsdp=2), 4, "with fsdp gives wrong gradients"),
        ({"schedule": "zero-bubble"}, Degrees(pp=2, fsdp=2), 4, "with fsdp gives wrong gradients"),
        ({}, Degrees(pp=4), 3, "3 micro batches are fewer than the 4 workers"),
        ({"schedule": "interleaved"}, Degrees(pp=2), 5, "takes micro batches in 2 rounds, and 5"),
    ],
)
def test_settings_that_do_not_go_together(
    settings: dict[str, Any], degrees: Degrees, micro_batches: int, message: str
) -> None:
    config = load({"pipeline": settings}, argv=[], environ={})
    with pytest.raises(PlanError, match=message):
        check(config, degrees, micro_batches)


def test_sequence_parallelism_is_refused() -> None:
    config = load({"tp": {"sequence_parallel": True}}, argv=[], environ={})
    with pytest.raises(PlanError, match="does not go with a pipeline"):
        check(config, Degrees(pp=2, tp=2), 4)


@pytest.mark.parametrize(("schedule", "per_worker"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_stages_per_worker_follow_the_schedule(schedule: str, per_worker: int) -> None:
    config = load({"pipeline": {"schedule": schedule}}, argv=[], environ={})
    assert check(config, Degrees(pp=2), 4) == per_worker


def test_stages_go_round_or_there_and_back() -> None:
    assert owners("1f1b", 3, 1) == [0, 1, 2]
    assert owners("interleaved", 2, 2) == [0, 1, 0, 1]
    assert owners("zbv", 3, 2) == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (8, 8)),
        ({"accumulate": 5}, (8, 5)),
        ({"pipeline": {"micro_batches": 6}, "global_batch": 24}, (2, 6)),
        ({"micro_batch": 2, "global_batch": 12}, (2, 3)),
    ],
)
def test_micro_batches_are_the_accumulation(settings: dict[str, Any], sizes: tuple[int, int]) -> None:
    found = batch(load(settings, argv=[], environ={}), 2, stages=4)
    assert (found.micro, found.accumulate) == sizes


def test_two_words_for_one_thing_must_agree() -> None:
    with pytest.raises(PlanError, match="they are the same thing"):
        batch(load({"accumulate": 4, "pipeline": {"micro_batches": 8}}, argv=[], environ={}), 2, stages=2)
