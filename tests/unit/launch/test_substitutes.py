"""Who takes the place of a lost node while the workers of the others wait."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.launch.control import substitutes
from dtctl.launch.control.session import LinkLost, NodeMessage, SessionFailed
from dtctl.launch.control.substitutes import Substitute, Substitutes
from dtctl.launch.records.events import Healed, NodeChanged, Note
from dtctl.supervisor.messages import NodeDescription, Ready
from tests.unit.launch.test_gang import Deaf
from tests.unit.launch.test_healing import LiveRig

DESCRIPTION = NodeDescription(gpus=0, address="10.0.0.9", port=0)


class Called(Deaf):
    """A session that connects to nobody."""

    def start(self) -> None:
        pass


class NodesRig(LiveRig):
    """Three nodes, of which a lost one is called again, and spares."""

    def __init__(self, folder: Path, *spares: str) -> None:
        super().__init__(folder)
        self.calls: list[tuple[str, bool]] = []
        self.spares = list(spares)
        healing = self.attempt.healing
        assert healing is not None
        healing._substitutes, healing._place = Substitutes(self.spares, self.call), self.place

    def call(self, name: str, is_new: bool) -> Called:
        self.calls.append((name, is_new))
        self.called = Called(name, queue.Queue())
        return self.called

    def place(self, substitute: Substitute, epoch: int) -> None:
        name, order = substitute.session.name, list(self.gang.sessions)
        order[order.index(substitute.lost)] = name
        sessions = self.gang.sessions | {name: substitute.session}
        self.gang.sessions = {each: sessions[each] for each in order}
        nodes = [replace(node, name=name) if node.name == substitute.lost else node for node in self.plan.nodes]
        self.attempt.replace_node(substitute.lost, name, replace(self.plan, nodes=tuple(nodes)))
        assert isinstance(substitute.session, Deaf)
        self.nodes[name] = substitute.session
        self.started = (name, epoch)

    def becomes_ready(self, session: Deaf) -> None:
        self.attempt.handle(NodeMessage(session, DESCRIPTION))
        self.attempt.handle(NodeMessage(session, Ready()))


def test_a_lost_node_that_answers_has_its_place_again(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.tell("b", LinkLost("gone"))
    assert rig.calls == [("b", False)]
    assert [rig.heals(node)[-1].lost for node in "ac"] == [[1], [1]]
    assert rig.attempt.open == {"a", "b", "c"}
    rig.attempt.check_deadlines()
    rig.becomes_ready(rig.called)
    assert rig.started == ("b", 1)
    rig.say("b", "started", interface="")
    rig.report("a", "hosting", port=5)
    rig.all_do("ready", 1)
    assert [(message.epoch, message.port) for message in rig.joins("b")] == [(1, 5)]
    rig.all_do("joined", 1)
    [healed] = [event for event in rig.events if isinstance(event, Healed)]
    assert [(each.rank, each.node, each.by) for each in healed.replaced] == [(1, "b", "b")]
    assert rig.spares == ["s"]
    states = [event.state for event in rig.events if isinstance(event, NodeChanged) and event.node == "b"]
    assert states == ["started", "lost", "started"]


def test_a_spare_is_called_when_the_node_fails_or_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = NodesRig(tmp_path, "s", "t")
    rig.tell("b", LinkLost("gone"))
    lost = rig.called
    monkeypatch.setattr(substitutes, "RETURN_S", -1.0)
    rig.attempt.check_deadlines()
    assert rig.calls == [("b", False), ("s", True)]
    rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
    rig.attempt.check_deadlines()
    assert rig.calls[2:] == [("t", True)]
    rig.becomes_ready(rig.called)
    assert rig.started == ("t", 1)
    assert lost.closed
    assert rig.attempt.open == {"a", "t", "c"}
    assert rig.attempt.ranks["t"] == {1}


def test_a_spare_that_was_not_needed_stands_by_again_and_knows_the_run(tmp_path: Path) -> None:
    spares, calls = ["s"], []

    def call(name: str, is_new: bool) -> Called:
        calls.append((name, is_new, Called(name, queue.Queue())))
        return calls[-1][2]

    found = Substitutes(spares, call)
    for is_first in (True, False):
        calls.clear()
        found.search("b")
        found._searches["b"].began_s -= substitutes.RETURN_S + 1
        found.check()
        for content in (DESCRIPTION, Ready()):
            substitute = found.take(NodeMessage(calls[0][2], content))
        assert substitute is not None
        assert calls[1][:2] == ("s", is_first)
        assert calls[1][2].closed
        assert spares == ["s"]


def test_when_nobody_can_take_the_place_all_are_stopped_and_the_node_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = NodesRig(tmp_path)
    rig.tell("b", LinkLost("gone"))
    monkeypatch.setattr(substitutes, "RETRY_S", -1.0)
    for _ in range(2):
        rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
        rig.attempt.check_deadlines()
    assert rig.calls == [("b", False)] * 3, "it may be starting again"
    monkeypatch.setattr(substitutes, "PATIENCE_S", -1.0)
    rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
    rig.attempt.check_deadlines()
    assert [rig.sent_to(node)[-1] for node in "ac"] == ["stop", "stop"]
    assert rig.attempt.outcome.lost_nodes == ["b"]
    assert rig.attempt.open == {"a", "c"}
    [failure] = rig.attempt.outcome.failures
    assert (failure.node, failure.rank) == ("b", None)
    assert any("off" in event.text for event in rig.events if isinstance(event, Note))


def test_a_node_that_fails_at_once_leaves_its_place_to_one_spare_and_is_called_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = NodesRig(tmp_path, "s", "t")
    rig.tell("b", LinkLost("gone"))
    monkeypatch.setattr(substitutes, "RETRY_S", -1.0)
    for _ in range(3):
        rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
        rig.attempt.check_deadlines()
    assert rig.calls == [("b", False), ("s", True), *[("b", False)] * 3]
    assert rig.spares == ["t"]


def test_a_run_that_is_stopped_while_a_node_is_replaced_does_not_wait_for_it(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path)
    rig.tell("b", LinkLost("gone"))
    rig.attempt.interrupt(2, hard=False)
    for node in "ac":
        rig.stopped(node)
    assert not rig.attempt.open
    assert rig.called.closed
    assert rig.attempt.outcome.lost_nodes == ["b"]
    assert rig.attempt.outcome.left_behind == {"a": 0, "b": None, "c": 0}


def test_connections_that_broke_without_a_loss_are_made_anew(tmp_path: Path) -> None:
    rig = LiveRig(tmp_path)
    rig.report("c", "cut", 0)
    rig.attempt.check_deadlines()
    assert not rig.heals("a"), "whoever is lost is known first"
    rig.attempt.link_timeout_s = -3.0
    for session in rig.nodes.values():
        session.last_heard = float("inf")
    rig.attempt.check_deadlines()
    assert [rig.heals(node)[0].lost for node in "abc"] == [[], [], []]
    rig.report("a", "hosting", port=5)
    rig.all_do("ready", 1, newcomers="")
    rig.all_do("joined", 1, newcomers="")
    [healed] = [event for event in rig.events if isinstance(event, Healed)]
    assert (healed.replaced, len(healed.survivors)) == ((), 3)
    assert rig.attempt.outcome.failures == []
