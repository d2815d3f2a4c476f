"""Which step all go on from when a worker was lost, and who gives the others their part of the state."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from dtctl.runtime.live.transfer import IncompleteState, RejoinPosition, TransferPlan, plan_state_transfer

NEW = RejoinPosition()
BEFORE, READY, TAKEN = RejoinPosition(7), RejoinPosition(7, is_ready=True), RejoinPosition(8, owes=True)


def test_a_step_that_nobody_has_taken_is_begun_again_by_all() -> None:
    assert plan_state_transfer([READY, NEW, BEFORE, READY], 2) == TransferPlan(
        step=7, ahead=[0, 2, 3], catching_up=[], behind=[1], sources={0: 0, 1: 3}
    )


def test_a_step_that_somebody_has_taken_is_taken_by_all_who_are_ready() -> None:
    """The other worker of its node was lost, and the other node has not come through the last exchange."""
    assert plan_state_transfer([TAKEN, NEW, READY, READY], 2) == TransferPlan(
        step=8, ahead=[0], catching_up=[2, 3], behind=[1], sources={0: 0, 1: 3}
    )


def test_with_a_whole_replica_on_each_worker_the_others_are_given_the_step() -> None:
    assert plan_state_transfer([BEFORE, NEW, TAKEN], 1) == TransferPlan(
        step=8, ahead=[2], catching_up=[], behind=[0, 1], sources={0: 2}
    )


def test_who_was_ready_for_a_step_long_taken_is_given_the_state() -> None:
    assert plan_state_transfer([RejoinPosition(9), NEW, READY, RejoinPosition(9)], 2).behind == [1, 2]


@pytest.mark.parametrize("left", [[TAKEN, NEW, TAKEN, NEW], [NEW, BEFORE, NEW, NEW], [TAKEN, NEW, READY, BEFORE]])
def test_no_part_of_the_state_is_made_up(left: list[RejoinPosition]) -> None:
    with pytest.raises(IncompleteState, match=r"part [01] of 2"):
        plan_state_transfer(left, 2)


@pytest.mark.parametrize(("replicas", "parts"), [(2, 2), (3, 2), (2, 3)])
def test_whoever_is_lost_and_whenever_the_state_is_there_if_each_part_has_a_survivor(replicas: int, parts: int) -> None:
    workers = range(replicas * parts)
    # Nobody comes through the last exchange before all have entered it.
    moments = [*product([BEFORE, READY], repeat=len(workers)), *product([READY, TAKEN], repeat=len(workers))]
    lost = [set(some) for count in range(1, len(workers)) for some in combinations(workers, count)]
    for moment, gone in product(moments, lost):
        left = [NEW if rank in gone else moment[rank] for rank in workers]
        if {rank % parts for rank in workers if rank not in gone} != set(range(parts)):
            with pytest.raises(IncompleteState):
                plan_state_transfer(left, parts)
            continue
        plan = plan_state_transfer(left, parts)
        assert plan.step == (8 if TAKEN in left else 7)
        assert set(plan.behind) == gone
        assert {part: rank % parts for part, rank in plan.sources.items()} == {part: part for part in range(parts)}
        assert gone.isdisjoint(plan.sources.values())
