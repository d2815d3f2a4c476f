"""Whom the nodes' own words blame when a collective fails."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dtctl.doctor.checks.collective import culprits, other_nccl, well
from dtctl.doctor.probe.child import Child

DONE: dict[str, Any] = {"stage": "done", "wrong": 0, "final": True}
LATE: dict[str, Any] = {"stage": "group", "wrong": 0, "error": "Timed out", "final": True}


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ({"a": DONE, "b": {**DONE, "wrong": 4}, "c": DONE}, ("b",)),
        ({"a": LATE, "b": {**LATE, "silent": True}, "c": LATE}, ("b",)),
        ({"a": LATE, "b": {"error": "it has ended with status -9", "complained": "", **LATE}, "c": LATE}, ("b",)),
        ({"a": LATE, "b": {**LATE, "stage": "start"}, "c": LATE}, ("b",)),
        ({"a": LATE, "b": {}, "c": LATE}, ("b",)),
        ({"a": LATE, "b": LATE, "c": LATE}, ()),
        ({"a": {**DONE, "wrong": 1}, "b": {**DONE, "wrong": 1}}, ()),
        ({"a": LATE, "b": {**LATE, "silent": True}, "c": {**LATE, "silent": True}}, ()),
    ],
)
def test_the_node_that_differs_is_named_and_nobody_where_all_say_the_same(
    answers: dict[str, Any], named: tuple[str, ...]
) -> None:
    assert not well(answers)
    assert culprits(answers) == named


def test_all_is_well_when_all_come_to_the_end_with_the_right_sums() -> None:
    assert well({"a": DONE, "b": DONE})


def child(program: str) -> Child:
    return Child([sys.executable, "-u", "-c", program], {"WORD": "x"})


def test_a_child_answers_in_lines_of_which_the_last_is_final() -> None:
    echo = child(
        "import json,os,sys\nfor line in sys.stdin:\n print('{\"a\": 1}')\n"
        " print(json.dumps({**json.loads(line), 'word': os.environ['WORD'], 'final': True}))"
    )
    assert echo.ask({"b": 2}, 10.0) == {"a": 1, "b": 2, "word": "x", "final": True}
    echo.kill()


def test_a_child_that_says_nothing_more_is_ended_in_time() -> None:
    silent = child('import time; print(\'{"stage": "start"}\', flush=True); time.sleep(100)')
    assert silent.ask({}, 2.0) == {"stage": "start", "silent": True, "complained": ""}


def test_a_child_that_ends_leaves_its_last_words() -> None:
    said = child("raise SystemExit('no disk')").ask({}, 10.0)
    assert said == {"error": "it has ended with status 1", "complained": "no disk"}


def test_an_nccl_that_is_not_the_one_of_the_wheel_is_named() -> None:
    good = ("2.27.3", "2.27.3")
    assert list(other_nccl({"a": good, "b": good, "c": ("", "2.20.5"), "d": ("2.27.3", "")})) == []
    assert list(other_nccl({"a": ("2.27.3.post1", "2.27.3")})) == []
    (one,) = other_nccl({"a": good, "b": ("2.27.3", "2.18.5")})
    assert (one.check, one.status, one.nodes) == ("nccl", "fail", ("b",))
    assert one.evidence == ("b: installed 2.27.3, loaded 2.18.5",)
    (every,) = other_nccl({"a": ("2.27.3", "2.18.5")})
    assert every.status == "warn", "alike everywhere: odd, and it may work"
