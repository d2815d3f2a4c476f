"""With which batch and learning rate a run goes on when something has changed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dtctl.errors import PlanError
from dtctl.runtime import resume
from dtctl.train.batch import BatchSizes, compute_batch_sizes
from dtctl.train.config import TrainConfig
from tests.facts import raises


def facts(config: TrainConfig, workers: int, *, used: BatchSizes | None = None, factor: float = 1.0) -> dict[str, Any]:
    asked = compute_batch_sizes(config, workers)
    return {"batch": resume.build_batch_facts(asked, used or asked), "rate_factor": factor}


def go_on(config: TrainConfig, workers: int, then: dict[str, Any]) -> tuple[int, int, int, float]:
    sizes, factor = resume.resolve_resumed_batch(config, compute_batch_sizes(config, workers), then)
    return sizes.micro, sizes.accumulate, sizes.total, factor


def test_the_same_goes_on_with_what_memory_allowed() -> None:
    config = TrainConfig(micro_batch=8)
    then = facts(config, 2, used=BatchSizes(micro=2, accumulate=4, world_size=2), factor=0.5)
    assert go_on(config, 2, then) == (2, 4, 16, 0.5)
    assert go_on(TrainConfig(micro_batch=4), 2, then) == (4, 1, 8, 0.5)
    assert go_on(config, 2, {}) == (8, 1, 16, 1.0)


@pytest.mark.parametrize(("workers", "expected"), [(1, (6, 4, 24)), (2, (6, 2, 24)), (3, (4, 2, 24)), (8, (3, 1, 24))])
def test_keep_keeps_the_global_batch(workers: int, expected: tuple[int, int, int]) -> None:
    config = TrainConfig(micro_batch=6)
    assert go_on(config, workers, facts(config, 4)) == (*expected, 1.0)


def test_what_cannot_be_kept_is_said() -> None:
    config = TrainConfig(micro_batch=6)
    with raises(PlanError, "global batch 24 5 workers"):
        go_on(config, 5, facts(config, 4))


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), ("sqrt", math.sqrt(2.0))])
def test_rules_scale_the_rate(rule: Any, factor: float) -> None:
    config = TrainConfig(micro_batch=6, accumulate=2, on_resize=rule)
    assert go_on(config, 4, facts(config, 2)) == (6, 2, 48, pytest.approx(factor))
    assert go_on(config, 2, facts(config, 4, factor=factor)) == (6, 2, 24, pytest.approx(1.0))


def test_a_global_batch_that_is_set_needs_no_rule() -> None:
    config = TrainConfig(global_batch=24, micro_batch=4, on_resize="linear")
    assert go_on(config, 3, facts(config, 2)) == (4, 2, 24, 1.0)
