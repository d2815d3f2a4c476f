"""What the launcher decides about a lost worker, message by message (docs/recovery.md)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dtctl.launch.records.events import Note, WorkersReplaced
from dtctl.supervisor.messages.attempt import Heal, Join
from tests.unit.launch.test_gang import Rig, worker


class LiveRig(Rig):
    def __init__(self, folder: Path, heal_s: float = 60.0) -> None:
        super().__init__(folder, heal_s=heal_s)
        for node in "abc":
            self.say(node, "started", interface="eth0")

    def report(self, node: str, state: str, epoch: int = 1, **facts: object) -> None:
        rank = "abc".index(node)
        self.say(node, "live", rank=rank, pid=100 + rank, epoch=epoch, state=state, **facts)

    def heals(self, node: str) -> list[Heal]:
        return [message for message in self.nodes[node].sent if isinstance(message, Heal)]

    def joins(self, node: str) -> list[Join]:
        return [message for message in self.nodes[node].sent if isinstance(message, Join)]

    def all_do(self, state: str, epoch: int, step: int = 7, newcomers: str = "b") -> None:
        for node in "abc":
            begun = state == "ready" and node in newcomers
            self.report(node, state, epoch, step=-1 if begun else step, repeats=node not in newcomers)


@pytest.fixture
def rig(tmp_path: Path) -> LiveRig:
    return LiveRig(tmp_path)


def test_a_killed_worker_is_replaced_and_the_others_are_named(rig: LiveRig) -> None:
    rig.exit("b", code=137, signal=9)
    assert [rig.heals(node)[0].lost for node in "abc"] == [[1], [1], [1]]
    assert rig.ledger.phase == "heal"
    rig.all_do("ready", 1)
    assert not rig.joins("a"), "nobody knows yet where to meet"
    rig.report("a", "hosting", port=4711)
    assert [(message.epoch, message.port) for message in rig.joins("b")] == [(1, 4711)]
    rig.all_do("joined", 1)
    assert rig.ledger.phase == "useful"
    [healed] = [event for event in rig.events if isinstance(event, WorkersReplaced)]
    assert [(each.rank, each.node, each.by) for each in healed.replaced] == [(1, "b", "b")]
    assert [(each.rank, each.pid) for each in healed.survivors] == [(0, 100), (2, 102)]
    assert (healed.step, healed.repeated_steps) == (7, 1)
    assert rig.attempt.nodes.outcome.failures == []
    for node in "abc":
        rig.exit(node)
        rig.stopped(node)
    assert rig.attempt.nodes.outcome.failures == []


def test_a_second_loss_begins_it_anew_and_words_about_the_first_count_no_more(rig: LiveRig) -> None:
    rig.exit("b", code=137, signal=9)
    rig.report("a", "hosting", port=1)
    rig.all_do("ready", 1)
    rig.exit("a", code=139, signal=11)
    second = rig.heals("c")[-1]
    assert (second.epoch, second.lost, second.host) == (2, [0], 2)
    rig.all_do("joined", 1)
    assert not any(isinstance(event, WorkersReplaced) for event in rig.events)
    rig.report("c", "hosting", 2, port=2)
    rig.all_do("ready", 2, newcomers="ab")
    assert [(message.epoch, message.port) for message in rig.joins("c")] == [(1, 1), (2, 2)]
    rig.all_do("joined", 2, newcomers="ab")
    [healed] = [event for event in rig.events if isinstance(event, WorkersReplaced)]
    assert [each.rank for each in healed.replaced] == [0, 1]


def test_who_does_not_reach_the_others_gets_another_epoch(rig: LiveRig) -> None:
    rig.exit("b", code=137, signal=9)
    rig.report("a", "hosting", port=1)
    rig.all_do("ready", 1)
    rig.report("a", "failed")
    rig.report("c", "failed")
    assert [(message.epoch, message.lost) for message in rig.heals("b")] == [(1, [1]), (2, [])]
    rig.report("a", "hosting", 2, port=2)
    rig.all_do("ready", 2)
    rig.all_do("joined", 2)
    assert any(isinstance(event, WorkersReplaced) for event in rig.events)


def stopped_because_of(rig: LiveRig, node: str) -> str:
    """See that all are stopped, and that the worker of this node is what the attempt has failed of; what was said."""
    assert [rig.sent_to(each)[-1] for each in "abc"] == ["stop"] * 3
    assert (rig.attempt.nodes.outcome.failures[0].node, rig.attempt.nodes.outcome.failures[0].signal) == (node, 9)
    return " ".join(event.text for event in rig.events if isinstance(event, Note))


def test_a_worker_that_cannot_is_the_end_of_it(rig: LiveRig) -> None:
    rig.exit("b", code=137, signal=9)
    rig.report("c", "unable", why="its buffers change")
    assert "rank 2 on c: its buffers change" in stopped_because_of(rig, "b")
    rig.exit("a", code=1)
    assert len(rig.attempt.nodes.outcome.failures) == 2


def test_an_exception_on_the_way_is_the_end_of_it_and_not_the_first_failure(rig: LiveRig) -> None:
    rig.exit("b", code=137, signal=9)
    rig.exit("a", code=1)
    stopped_because_of(rig, "b")


def test_nobody_is_left(rig: LiveRig) -> None:
    for node in "bac":
        rig.exit(node, code=137, signal=9)
    stopped_because_of(rig, "b")


def test_the_limit(tmp_path: Path) -> None:
    rig = LiveRig(tmp_path, heal_s=0.0)
    rig.exit("b", code=137, signal=9)
    rig.report("a", "ready", step=7)
    rig.attempt.deadlines.check()
    assert "job.heal_s" in stopped_because_of(rig, "b")


def test_the_same_step_is_not_healed_for_ever(rig: LiveRig) -> None:
    for epoch in range(1, 5):
        rig.exit("b", code=137, signal=9)
        rig.report("a", "hosting", epoch, port=5)
        rig.all_do("ready", epoch)
        rig.all_do("joined", epoch)
    rig.exit("b", code=137, signal=9)
    stopped_because_of(rig, "b")
    assert len(rig.heals("a")) == 4


def test_a_worker_that_hangs_was_lost_when_it_stopped_moving(rig: LiveRig) -> None:
    for node, place in zip("abc", (2, 1, 2), strict=True):
        rig.nodes[node].last_heard = time.monotonic()
        rig.say(node, "pong", workers=[worker("abc".index(node), place=place)])
    rig.attempt.deadlines.check()
    for node in "abc":
        rig.say(node, "stacks-end")
    rig.attempt.deadlines.check()
    assert rig.heals("a")[0].lost == [1]
    rig.exit("b", code=137, signal=9)
    rig.report("a", "hosting", port=1)
    rig.all_do("ready", 1)
    rig.all_do("joined", 1)
    [healed] = [event for event in rig.events if isinstance(event, WorkersReplaced)]
    assert 9.0 <= healed.detect_s < 60.0


@pytest.mark.parametrize("first", [4, 8], ids=["in a later step", "in the first step after another healing"])
def test_a_survivor_that_does_not_react_is_replaced_too(rig: LiveRig, first: int) -> None:
    before = first == 8
    if before:
        rig.exit("b", code=137, signal=9)
        rig.report("a", "hosting", port=1)
        rig.all_do("ready", 1)
        rig.all_do("joined", 1)
    rig.exit("b", code=137, signal=9)
    rig.report("a", "ready", 1 + before, step=7)
    for node in "ac":
        rig.nodes[node].last_heard = time.monotonic()
        rig.say(node, "pong", workers=[worker("abc".index(node), first=first)])
    rig.attempt.deadlines.check()
    assert len(rig.heals("a")) == 1 + before, "it was asked just now"
    current = rig.attempt.losses.healing and rig.attempt.losses.healing._current
    assert current
    current.asked_s -= 6.0
    rig.attempt.deadlines.check()
    assert [message.lost for message in rig.heals("a")][before:] == [[1], [2]]
    rig.exit("c", code=137, signal=9)
    rig.report("a", "hosting", 2 + before, port=5)
    rig.all_do("ready", 2 + before, newcomers="bc")
    rig.all_do("joined", 2 + before, newcomers="bc")
    healed = [event for event in rig.events if isinstance(event, WorkersReplaced)][-1]
    assert [each.rank for each in healed.replaced] == [1, 2]


@pytest.mark.parametrize("state", ["T", "S"], ids=["one is stopped", "all run"])
def test_a_worker_that_is_stopped_while_it_joins_is_replaced_too(rig: LiveRig, state: str) -> None:
    """All wait for each other there, so that silence alone accuses nobody."""
    rig.exit("b", code=137, signal=9)
    rig.report("a", "hosting", port=1)
    rig.all_do("ready", 1)
    assert len(rig.joins("a")) == 1
    for node in "ac":
        rig.nodes[node].last_heard = time.monotonic()
        rig.say(node, "pong", workers=[worker("abc".index(node), state=state if node == "c" else "S")])
    rig.attempt.deadlines.check()
    assert len(rig.heals("a")) == 1, "it was asked just now"
    current = rig.attempt.losses.healing and rig.attempt.losses.healing._current
    assert current
    assert current.called_s is not None
    current.called_s -= 6.0
    rig.attempt.deadlines.check()
    assert [message.lost for message in rig.heals("a")] == [[1], [2]][: 1 + (state == "T")]


def test_what_is_no_loss_is_a_failure_as_ever(rig: LiveRig) -> None:
    rig.exit("b", code=3)
    assert rig.sent_to("a") == ["stop"]


def test_after_a_worker_has_ended_well_nobody_is_replaced(rig: LiveRig) -> None:
    rig.exit("a")
    rig.exit("b", code=137, signal=9)
    assert rig.sent_to("c") == ["stop"]
