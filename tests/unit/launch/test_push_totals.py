"""Progress of the files of all nodes: one event for all, at most two a second, and a last one when all have them."""

from __future__ import annotations

import pytest

from dtctl.launch.control import node_sessions
from dtctl.launch.control.node_sessions import PushTotals
from dtctl.launch.records.events import PushAdvanced, PushProgress

EVERY = ("a", "b")
NOTHING = PushProgress(sent=0, of=0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(node_sessions.time, "monotonic", lambda: now[0])
    return now


def test_nodes_are_counted_together(clock: list[float]) -> None:
    totals = PushTotals()
    assert totals.update("a", NOTHING, is_done=False), "it has begun"
    assert totals.make_event(EVERY) is None, "it is not known yet whether anything is sent"
    assert not totals.update("a", PushProgress(sent=0, of=1000), is_done=False)
    clock[0] += 2
    totals.update("a", PushProgress(sent=400, of=1000), is_done=False)
    totals.update("b", PushProgress(sent=0, of=600), is_done=False)
    assert totals.make_event(EVERY) == PushAdvanced(
        nodes=2, nodes_done=0, bytes=400, of=1600, bytes_per_s=200.0, time=pytest.approx(0, abs=1e12)
    )
    totals.update("a", PushProgress(sent=500, of=1000), is_done=False)
    assert totals.make_event(EVERY) is None, "the last one is new"
    assert totals.update("a", PushProgress(bytes=10, of=1000), is_done=True)
    clock[0] += 1
    assert totals.update("b", PushProgress(bytes=10, of=600), is_done=True)
    last = totals.make_event(EVERY)
    assert last is not None
    assert (last.nodes_done, last.bytes, last.of) == (2, 1600, 1600)
    clock[0] += 10
    assert totals.make_event(EVERY) is None, "it is over"


def test_a_rate_is_that_of_the_last_seconds(clock: list[float]) -> None:
    totals, rates = PushTotals(), []
    for second in range(30):
        totals.update("a", PushProgress(sent=min(second, 10) * 100, of=5000), is_done=False)
        event = totals.make_event(EVERY)
        rates.append(event.bytes_per_s if event else None)
        clock[0] += 1
    assert rates[9:11] == [100.0, 100.0]
    assert rates[20] == 0.0, "nothing has come for ten seconds"


def test_nodes_that_have_failed_do_not_keep_it_open(clock: list[float]) -> None:
    totals = PushTotals()
    totals.update("a", PushProgress(of=10), is_done=True)
    clock[0] += 1
    event = totals.make_event(EVERY)
    assert event is not None
    assert (event.nodes, event.nodes_done) == (2, 1)
    totals.remove("b")
    event = totals.make_event(EVERY)
    assert event is not None
    assert (event.nodes, event.nodes_done) == (1, 1)


def test_nothing_to_send_is_no_event() -> None:
    totals = PushTotals()
    for name in EVERY:
        totals.update(name, NOTHING, is_done=False)
        assert totals.update(name, PushProgress(state="have", bytes=0, of=0), is_done=True)
    assert totals.make_event(EVERY) is None
