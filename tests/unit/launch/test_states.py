"""Every state of an attempt ends: what ends it, or its time (dtctl/launch/control/deadlines.py)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtctl.launch.control.deadlines import STATES, AttemptState
from tests.unit.launch.test_gang import Rig, worker

LONG_S = 10_000.0


def begin(rig: Rig) -> None:
    """All nodes have started."""
    for node in "abc":
        rig.say(node, "started")
        rig.say(node, "pong", workers=[worker("abc".index(node), stale_s=0.0)])


def heal(rig: Rig) -> None:
    """A worker is lost and is being replaced."""
    begin(rig)
    rig.exit("b", code=137, signal=9)


def end_one(rig: Rig) -> None:
    """A worker has ended well."""
    begin(rig)
    rig.exit("a")


def end_all(rig: Rig) -> None:
    """All workers have, and no node has said that it is done."""
    begin(rig)
    for node in "abc":
        rig.exit(node)


def stop(rig: Rig) -> None:
    """Somebody wants it to stop."""
    begin(rig)
    rig.attempt.nodes.interrupt(15, hard=False)


WAYS: dict[AttemptState, Callable[[Rig], None]] = {
    AttemptState.STARTING: lambda _: None,
    AttemptState.RUNNING: begin,
    AttemptState.HEALING: heal,
    AttemptState.ENDING: end_one,
    AttemptState.CLOSING: end_all,
    AttemptState.STOPPING: stop,
}


def wait(rig: Rig, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let time pass in which nodes answer the launcher, and no worker moves."""
    now = time.monotonic() + seconds
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for number, node in enumerate("abc"):
        rig.nodes[node].last_heard = now
        if ("abc"[number], number) not in rig.attempt.nodes.ended_workers:
            rig.say(node, "pong", workers=[worker(number, stale_s=seconds)])
    rig.gang.detect_launcher_pause()
    rig.gang.away_s = 0.0


@pytest.mark.parametrize("state", AttemptState)
def test_no_state_lasts_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: AttemptState) -> None:
    rig = Rig(tmp_path, heal_s=60.0)
    if state is AttemptState.OVER:
        assert state not in STATES
        return
    WAYS[state](rig)
    assert rig.attempt.deadlines.state is state
    seen = [state]
    for _ in range(40):
        wait(rig, monkeypatch, LONG_S)
        rig.attempt.deadlines.check()
        if rig.attempt.deadlines.state is not seen[-1]:
            assert rig.attempt.deadlines.state in STATES[seen[-1]].next
            seen.append(rig.attempt.deadlines.state)
        if rig.attempt.deadlines.state is AttemptState.OVER:
            break
    assert seen[-1] is AttemptState.OVER, seen


@pytest.mark.parametrize("state", AttemptState)
def test_a_program_without_steps_is_bounded_by_its_time_where_by_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: AttemptState
) -> None:
    """Nobody can say of it that it hangs: it may be a server. `job.time_s` and the user end it."""
    if state in (AttemptState.HEALING, AttemptState.OVER):  # only what tells its steps is healed
        return
    rig = Rig(tmp_path)
    if state is not AttemptState.STARTING:
        for node in "abc":
            rig.say(node, "started")
    ended = {AttemptState.ENDING: "a", AttemptState.CLOSING: "abc"}.get(state, "")
    for node in ended:
        rig.exit(node)
    if state is AttemptState.STOPPING:
        rig.attempt.nodes.interrupt(15, hard=False)
    assert rig.attempt.deadlines.state is state
    now = time.monotonic() + LONG_S
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for node in "abc":
        rig.nodes[node].last_heard = now
        rig.say(node, "pong", workers=[])
    rig.gang.detect_launcher_pause()
    rig.gang.away_s = 0.0
    rig.attempt.deadlines.check()
    assert (rig.attempt.deadlines.state is state) is bool(STATES[state].open_ended)
    if STATES[state].open_ended:
        rig.gang.time_s = 60.0
        rig.gang.next_message(0.0)
        assert rig.gang.signals == [signal.SIGUSR1]
        rig.attempt.nodes.interrupt(rig.gang.signals[0], hard=False)
        assert rig.attempt.deadlines.state is AttemptState.STOPPING


@pytest.mark.parametrize("number", [9, 11])
def test_a_survivor_that_ends_well_ends_the_healing(tmp_path: Path, number: int) -> None:
    rig = Rig(tmp_path, heal_s=60.0)
    begin(rig)
    rig.exit("b", code=128 + number, signal=number)
    assert rig.attempt.deadlines.state is AttemptState.HEALING
    rig.exit("a")
    assert rig.attempt.deadlines.state is AttemptState.STOPPING
    assert [rig.sent_to(node)[-1] for node in "abc"] == ["stop"] * 3
    assert (rig.attempt.nodes.outcome.failures[0].node, rig.attempt.nodes.outcome.failures[0].signal) == ("b", number)


def test_the_end_of_a_worker_before_the_loss_of_another_is_no_healing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, heal_s=60.0)
    end_one(rig)
    rig.exit("b", code=137, signal=9)
    assert rig.attempt.deadlines.state is AttemptState.STOPPING
