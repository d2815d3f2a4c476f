"""When a failed gang is started again, and when it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtctl.launch.control.failure import Failure
from dtctl.launch.control.restart_policy import SAME_LIMIT, RestartPolicy

FAILURE = Failure(node="a", rank=3, exit_code=1, signal=None, time=0.0, summary="ValueError: no")


def test_the_first_failure_is_followed_at_once_and_the_next_ones_later() -> None:
    patience = RestartPolicy()
    other = replace(FAILURE, summary="KeyError: no")
    waits = [
        patience.decide_next_attempt(each, step=None, lasted_s=1).wait_s for each in (FAILURE, FAILURE, other, other)
    ]
    assert waits == [0.0, 1.0, 0.0, 1.0]


def test_what_fails_in_the_same_way_at_the_same_step_is_hopeless() -> None:
    patience = RestartPolicy()
    verdicts = [patience.decide_next_attempt(FAILURE, step=70, lasted_s=1) for _ in range(SAME_LIMIT)]
    assert [verdict.give_up_reason is None for verdict in verdicts] == [True, True, False]
    assert verdicts[-1].give_up_reason == "3 attempts have failed in the same way at step 70"


def test_what_another_worker_says_in_the_same_words_is_the_same_failure() -> None:
    patience = RestartPolicy()
    verdicts = [
        patience.decide_next_attempt(replace(FAILURE, rank=rank, node=f"n{rank}"), step=70, lasted_s=1)
        for rank in range(3)
    ]
    assert verdicts[-1].give_up_reason is not None, "which of them was first is chance"


def test_progress_gives_new_patience() -> None:
    patience = RestartPolicy()
    assert all(
        patience.decide_next_attempt(FAILURE, step=step, lasted_s=1).give_up_reason is None for step in range(20)
    )
    assert all(
        patience.decide_next_attempt(FAILURE, step=None, lasted_s=1000).give_up_reason is None for _ in range(20)
    )


def test_another_failure_is_not_the_same_one() -> None:
    patience = RestartPolicy()
    for index in range(20):
        assert (
            patience.decide_next_attempt(replace(FAILURE, summary=str(index)), step=5, lasted_s=1).give_up_reason
            is None
        )


def test_a_step_that_was_done_before_is_no_progress() -> None:
    patience = RestartPolicy()
    patience.decide_next_attempt(FAILURE, step=100, lasted_s=1)
    verdicts = [patience.decide_next_attempt(FAILURE, step=60, lasted_s=1) for _ in range(SAME_LIMIT)]
    assert verdicts[-1].give_up_reason is not None


def test_who_was_killed_from_outside_is_started_again_at_once() -> None:
    patience = RestartPolicy()
    killed = replace(FAILURE, exit_code=137, signal=9)
    lost = replace(FAILURE, exit_code=None, rank=None)
    for failure in [killed] * 10 + [lost] * 10:
        verdict = patience.decide_next_attempt(failure, step=5, lasted_s=1)
        assert (verdict.wait_s, verdict.give_up_reason) == (0.0, None)
    crashed = replace(FAILURE, exit_code=139, signal=11)
    assert [patience.decide_next_attempt(crashed, step=5, lasted_s=1).give_up_reason is None for _ in range(3)] == [
        True,
        True,
        False,
    ]


def test_a_hang_at_the_same_step_is_a_failure_of_the_program() -> None:
    patience = RestartPolicy()
    verdicts = []
    for seconds in (31, 32, 33):
        hung = replace(FAILURE, exit_code=None, hang=True, summary=f"no progress for {seconds} s in step 71: rank 3")
        verdicts.append(patience.decide_next_attempt(hung, step=70, lasted_s=1))
    assert [verdict.give_up_reason is None for verdict in verdicts] == [True, True, False]


def test_a_lack_of_memory_comes_back_and_a_kill_by_somebody_does_not() -> None:
    patience = RestartPolicy()
    verdicts = []
    for count in range(3):
        starved = replace(FAILURE, exit_code=137, signal=9, node_reason=f"oom_kill went from {count} to {count + 1}")
        verdicts.append(patience.decide_next_attempt(starved, step=70, lasted_s=1))
    assert [verdict.give_up_reason is None for verdict in verdicts] == [True, True, False]


@pytest.mark.parametrize("code", [3, 4])
def test_workers_that_refuse_the_spec_are_not_started_again(code: int) -> None:
    refused = replace(FAILURE, exit_code=code, summary="error: the global batch cannot be kept")
    assert RestartPolicy(trains=True).decide_next_attempt(refused, step=None, lasted_s=1).give_up_reason
    assert not RestartPolicy().decide_next_attempt(refused, step=None, lasted_s=1).give_up_reason, (
        "another program's codes mean something else"
    )


def test_the_same_error_in_the_same_step_after_good_ones_is_the_programs() -> None:
    patience = RestartPolicy()
    assert patience.decide_next_attempt(FAILURE, step=70, first=0, lasted_s=1).give_up_reason is None
    verdict = patience.decide_next_attempt(FAILURE, step=70, first=60, lasted_s=1)
    assert verdict.give_up_reason == "2 attempts have failed with the same error after step 70"


@pytest.mark.parametrize(
    ("changes", "step", "first"),
    [
        ({}, 70, 70),  # at its first step: a file server that is away is there, too
        ({}, 69, 60),
        ({}, 70, None),
        ({"summary": "KeyError: no"}, 70, 60),
        ({"hang": True, "exit_code": None}, 70, 60),
        ({"node_reason": "the kernel killed it for lack of memory"}, 70, 60),
        ({"exit_code": 137, "signal": 9}, 70, 60),
    ],
)
def test_what_may_have_come_from_a_machine_is_tried_again(
    changes: dict[str, Any], step: int, first: int | None
) -> None:
    patience = RestartPolicy()
    before = replace(replace(FAILURE, **changes), summary="ValueError: no")
    patience.decide_next_attempt(before, step=70, first=0, lasted_s=1)
    assert (
        patience.decide_next_attempt(replace(FAILURE, **changes), step=step, first=first, lasted_s=1).give_up_reason
        is None
    )


def test_an_error_that_names_its_step_is_known_again_by_it() -> None:
    patience = RestartPolicy()
    first = replace(FAILURE, summary="error: the gradient of step 21 is not finite: somewhere")
    again = replace(FAILURE, summary="error: the gradient of step 21 is not finite: in 0.bias")
    patience.decide_next_attempt(first, step=24, first=0, lasted_s=1)
    assert patience.decide_next_attempt(again, step=20, first=15, lasted_s=1).give_up_reason is not None
    patience = RestartPolicy()
    patience.decide_next_attempt(first, step=24, first=0, lasted_s=1)
    other = replace(first, summary=first.summary.replace("21", "22"))
    assert patience.decide_next_attempt(other, step=20, first=15, lasted_s=1).give_up_reason is None


@pytest.mark.parametrize(
    ("summary", "facts"),
    [
        ("ModuleNotFoundError: No module named 'torch'", {}),
        ("/v/python: Error while finding module specification for 'torch' (ModuleNotFoundError: ...)", {}),
        ("ImportError: cannot import name 'x' from 'y'", {}),
        ("SyntaxError: invalid syntax", {}),
        ("train.py: error: unrecognized arguments: --x", {"exit_code": 2, "tail": ("usage: train.py",)}),
        ("python3: can't open file '/x/t.py': [Errno 2] No such file or directory", {"exit_code": 2}),
        ("bash: line 1: nope: command not found", {"exit_code": 127}),
    ],
)
def test_what_no_restart_changes_ends_the_run_at_once(summary: str, facts: dict[str, Any]) -> None:
    failure = replace(FAILURE, summary=summary, **facts)
    assert RestartPolicy().decide_next_attempt(failure, step=None, lasted_s=2).give_up_reason is not None
    assert RestartPolicy().decide_next_attempt(failure, step=0, lasted_s=2).give_up_reason is not None
    # After steps, or after a while, something else has changed meanwhile: a disk, a file server.
    assert RestartPolicy().decide_next_attempt(failure, step=7, lasted_s=2).give_up_reason is None
    assert RestartPolicy().decide_next_attempt(failure, step=None, lasted_s=1000).give_up_reason is None
    assert RestartPolicy().decide_next_attempt(replace(failure, signal=9), step=None, lasted_s=2).give_up_reason is None
