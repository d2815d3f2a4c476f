"""One action on many nodes: one answer each, in order, and nobody waits for the slow ones."""

from __future__ import annotations

import threading

import pytest

from dtctl.errors import AuthError, ConnectError, DtctlError, NodeFailures
from dtctl.transport.fanout import MAX_PARALLEL, fan_out, raise_failures
from tests.facts import raises


def test_one_answer_per_node_in_the_order_of_the_nodes() -> None:
    names = [f"gpu{number}" for number in (3, 1, 2, *range(10, 300))]
    done = fan_out({name: index for index, name in enumerate(names)}, lambda index: index * 2)
    assert list(done) == names
    assert list(done.values()) == [index * 2 for index in range(len(names))]


def test_no_nodes_no_answers() -> None:
    assert fan_out({}, lambda item: item) == {}


def test_the_fault_of_one_node_does_not_hide_that_of_another() -> None:
    def act(name: str) -> str:
        if name == "b":
            raise ConnectError("refused", node=name)
        if name == "d":
            raise AuthError("no key", node=name)
        return name.upper()

    done = fan_out({name: name for name in "abcd"}, act)
    assert [type(answer).__name__ for answer in done.values()] == ["str", "ConnectError", "str", "AuthError"]


def test_a_slow_node_does_not_hold_the_others_back() -> None:
    """The slow one ends only when all the others have: were they in line behind it, this would never end."""
    others = threading.Semaphore(0)

    def act(name: str) -> str:
        if name == "slow":
            for _ in range(100):
                assert others.acquire(timeout=600), "the others wait for the slow one"
        else:
            others.release()
        return name

    names = ["slow", *(f"gpu{number}" for number in range(100))]
    assert list(fan_out({name: name for name in names}, act, max_parallel=4)) == names


def test_all_act_at_once_up_to_the_limit() -> None:
    meeting = threading.Barrier(MAX_PARALLEL)
    done = fan_out({str(number): number for number in range(MAX_PARALLEL)}, lambda _: meeting.wait(timeout=600))
    assert sorted(done.values()) == list(range(MAX_PARALLEL))  # type: ignore[type-var]

    running, most, lock = 0, 0, threading.Lock()

    def count(_: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1

    fan_out({str(number): number for number in range(200)}, count, max_parallel=3)
    assert 1 <= most <= 3


def test_a_bug_is_raised_when_all_have_answered_and_the_first_in_order_counts() -> None:
    asked = []

    def act(name: str) -> None:
        asked.append(name)
        if name in "bc":
            raise KeyError(name)

    with pytest.raises(KeyError, match="b"):
        fan_out({name: name for name in "abcd"}, act)
    assert sorted(asked) == list("abcd")


def test_failures_are_raised_once() -> None:
    raise_failures({})
    one: dict[str, DtctlError] = {"a": ConnectError("refused", node="a")}
    with raises(ConnectError, "refused"):
        raise_failures(one)
    with pytest.raises(NodeFailures) as caught:
        raise_failures({**one, "b": AuthError("no key", node="b")})
    assert list(caught.value.failures) == ["a", "b"]
