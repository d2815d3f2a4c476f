"""Answers of probes that leave keys out: refused, or read by all checks and tables as far as they go."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from dtctl.doctor import answers
from dtctl.doctor.node_report import MEETING, REACHED
from dtctl.errors import NodeError
from tests.security import probe_answers

FEW = 12
"""Keys of which every choice is left out; of more, each and each two."""
Path = tuple[Any, ...]


@pytest.fixture(scope="module")
def good() -> probe_answers.Answers:
    return probe_answers.real_answers()


def objects(value: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every object within a value, and the way to it; of a list the first item."""
    if isinstance(value, dict):
        yield path, value
        for key, inner in value.items():
            yield from objects(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from objects(value[0], (*path, 0))


def with_less(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The value with every choice of keys left out, in each object within it."""
    for path, found in objects(value):
        sizes = range(len(found) + 1) if len(found) <= FEW else (1, 2)
        for size in sizes:
            for left_out in combinations(found, size):
                changed = copy.deepcopy(value)
                inner = changed
                for key in path:
                    inner = inner[key]
                for key in left_out:
                    del inner[key]
                yield changed


def read(good: probe_answers.Answers, op: str, value: dict[str, Any]) -> int:
    """How many of the answers with less are read; the others are refused."""
    count, reports = 0, probe_answers.reports(good)
    for changed in with_less(value):
        liar = copy.copy(reports[1])
        try:
            probe_answers.take(liar, op, changed)
        except NodeError:
            continue
        count += 1
        if op not in ("round", "start-python"):  # which the reports do not have
            probe_answers.judge([reports[0], liar])
    return count


def test_the_real_answers_are_read_whole(good: probe_answers.Answers) -> None:
    assert answers._ANSWERS.keys() - good.keys() == {"time", "spread", "mark", "look", "unmark"}, "form without choices"
    reports = probe_answers.reports(good)
    for op, value in good.items():
        probe_answers.take(reports[1], op, value)
    assert '"packet-loss"' not in probe_answers.judge(reports)


@pytest.mark.parametrize("op", ["facts", "job-python", "listen", "round", "start-python"])
def test_an_answer_that_leaves_keys_out_is_refused_or_read(good: probe_answers.Answers, op: str) -> None:
    assert read(good, op, good[op]) > 0


@pytest.mark.parametrize("kind", ["data-0", "rendezvous", MEETING, REACHED])
@pytest.mark.parametrize("result", answers._RESULTS)
def test_a_call_that_leaves_keys_out_is_refused_or_read(good: probe_answers.Answers, kind: str, result: str) -> None:
    (call,) = good["call"]["answers"]
    assert read(good, "call", {"answers": [{**call, "kind": kind, "result": result}]}) > 0


@pytest.mark.parametrize("broken", ["", "stalled"])
def test_a_measurement_that_leaves_keys_out_is_refused_or_read(good: probe_answers.Answers, broken: str) -> None:
    assert read(good, "measure", {**good["measure"], "broken": broken}) > 0


@pytest.mark.parametrize("result", answers._RESULTS)
def test_a_measurement_that_was_not_made_leaves_keys_out(good: probe_answers.Answers, result: str) -> None:
    failed = {"error": "x", "result": result, "broken": "reset", "sent": 1, "lost": 1}
    assert read(good, "measure", failed) > 0


def test_what_a_check_reads_is_demanded(good: probe_answers.Answers) -> None:
    """Each has ended the doctor in a bug of dtctl."""
    reports = probe_answers.reports(good)
    tmp = {key: value for key, value in good["facts"]["tmp"].items() if key != "why"}
    for op, value in (
        ("facts", {**good["facts"], "tmp": tmp}),
        ("measure", {"lost": 0}),
        ("measure", {"result": "refused", "broken": "reset"}),
        ("round", {"each": [{"stage": "sum", "seconds": 1.0}, good["start-python"]]}),
    ):
        with pytest.raises(NodeError):
            probe_answers.take(reports[1], op, value)
