"""Who takes the place of a lost node while the workers of the others wait."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.launch.control import substitutes
from dtctl.launch.control.session import LinkLost, NodeMessage, Session, SessionFailed
from dtctl.launch.control.substitutes import NotHealed, Substitute, Substitutes
from dtctl.launch.records.events import Healed, NodeChanged, Note
from dtctl.supervisor.messages.base import Refusal
from dtctl.supervisor.messages.setup import NodeDescription, Ready
from tests.unit.launch.test_gang import Deaf
from tests.unit.launch.test_healing import LiveRig

DESCRIPTION = NodeDescription(gpus=0, address="10.0.0.9", port=0)


class Called(Deaf):
    """A session that connects to nobody."""

    def start(self) -> None:
        pass

    def wait_closed(self, timeout_s: float) -> None:
        pass


class NodesRig(LiveRig):
    """Three nodes, of which a lost one is called again, and spares."""

    def __init__(self, folder: Path, *spares: str) -> None:
        super().__init__(folder)
        self.calls: list[str] = []
        self.warmed_up: list[str] = []
        self.is_fit = True
        self.complaints: list[tuple[str, str]] = []
        self.spares = list(spares)
        healing = self.attempt.healing
        assert healing is not None
        healing._place = self.place
        healing._substitutes = Substitutes(
            self.spares,
            self.call,
            warm_up=self.warm_up,
            complain=lambda name, reason: self.complaints.append((name, reason)),
        )

    def warm_up(self, session: Session, description: NodeDescription) -> None:
        assert description is DESCRIPTION
        if not self.is_fit:
            raise NotHealed("too few GPUs")
        self.warmed_up.append(session.name)

    def call(self, name: str) -> Called:
        self.calls.append(name)
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
    assert rig.calls == ["b"]
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
    assert rig.calls == ["b", "s"]
    rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
    rig.attempt.check_deadlines()
    assert rig.calls[2:] == ["t"]
    rig.becomes_ready(rig.called)
    assert rig.started == ("t", 1)
    assert lost.closed
    assert rig.attempt.open == {"a", "t", "c"}
    assert rig.attempt.ranks["t"] == {1}


def test_a_spare_that_was_not_needed_can_be_called_again(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    healing = rig.attempt.healing
    assert healing is not None
    found = healing._substitutes
    assert found is not None
    for _ in range(2):
        rig.calls.clear()
        assert found.search("b") is None
        lost = rig.called
        found._searches["b"].began_s -= substitutes.RETURN_S + 1
        found.check()
        for content in (DESCRIPTION, Ready()):
            substitute = found.take(NodeMessage(lost, content))
        assert substitute is not None
        assert rig.calls == ["b", "s"]
        assert rig.called.closed
        assert rig.spares == ["s"]


def test_a_spare_that_stands_by_takes_the_place_at_once_and_the_lost_node_is_a_spare_then(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.attempt.check_deadlines()
    rig.becomes_ready(rig.called)
    assert rig.warmed_up == ["s"]
    rig.attempt.check_deadlines()
    assert rig.calls == ["s"]
    rig.tell("b", LinkLost("gone"))
    assert rig.calls == ["s"]
    assert rig.started == ("s", 1)
    assert rig.attempt.open == {"a", "s", "c"}
    assert rig.spares == ["b"]


def test_two_spares_stand_by_and_then_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = NodesRig(tmp_path, "s", "t", "u")
    monkeypatch.setattr(substitutes, "RETRY_S", 1000.0)
    rig.attempt.check_deadlines()
    assert rig.calls == ["s", "t"]
    rig.becomes_ready(rig.called)
    rig.tell("b", LinkLost("gone"))
    assert rig.started == ("t", 1), "the one that is ready"
    rig.attempt.check_deadlines()
    assert rig.calls == ["s", "t", "u"]
    assert rig.spares == ["b"], "it was lost a moment ago"


def test_a_spare_that_does_not_fit_is_told_of_and_not_called_again(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.is_fit = False
    rig.attempt.check_deadlines()
    rig.becomes_ready(rig.called)
    assert rig.complaints == [("s", "too few GPUs")]
    rig.attempt.check_deadlines()
    assert (rig.calls, rig.spares) == (["s"], [])


def test_a_spare_that_is_silent_is_not_relied_upon(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.attempt.check_deadlines()
    standby = rig.called
    rig.becomes_ready(standby)
    standby.last_heard -= substitutes.FRESH_S + 1
    rig.tell("b", LinkLost("gone"))
    assert standby.closed
    assert rig.calls == ["s", "b"]
    assert rig.spares == ["s"]
    rig.becomes_ready(rig.called)
    assert rig.started == ("b", 1)


def test_a_spare_that_is_not_ready_yet_takes_part_in_the_search(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.attempt.check_deadlines()
    standby = rig.called
    rig.attempt.handle(NodeMessage(standby, DESCRIPTION))
    rig.tell("b", LinkLost("gone"))
    rig.attempt.handle(NodeMessage(standby, Ready()))
    assert rig.started == ("s", 1)
    assert rig.warmed_up == []
    assert rig.called.closed, "the lost node was called, too"
    assert rig.spares == ["b"]


def test_a_spare_that_cannot_stand_by_is_told_of_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.attempt.check_deadlines()
    rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
    assert rig.complaints == [("s", "off")]
    rig.attempt.check_deadlines()
    assert rig.calls == ["s"], "not at once"
    monkeypatch.setattr(substitutes, "STANDBY_RETRY_S", -1.0)
    rig = NodesRig(tmp_path, "s")
    for content in (Refusal(code="disk-full", message="1 MiB is left"), LinkLost(""), LinkLost("")):
        rig.attempt.check_deadlines()
        rig.attempt.handle(NodeMessage(rig.called, content))
    assert rig.calls == ["s", "s", "s"]
    assert rig.complaints == [("s", "1 MiB is left")]
    assert rig.spares == ["s"]


def test_whoever_stands_by_is_sent_away_at_the_end(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.attempt.check_deadlines()
    rig.becomes_ready(rig.called)
    rig.attempt.interrupt(2, hard=False)
    for node in "abc":
        rig.stopped(node)
    rig.attempt.close()
    assert [message.op for message in rig.called.sent] == ["quit"]
    assert rig.called.closed
    assert rig.spares == ["s"]
    assert rig.attempt.outcome.left_behind == {"a": 0, "b": 0, "c": 0}


def test_when_nobody_can_take_the_place_all_are_stopped_and_the_node_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = NodesRig(tmp_path)
    rig.tell("b", LinkLost("gone"))
    monkeypatch.setattr(substitutes, "RETRY_S", -1.0)
    for _ in range(2):
        rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
        rig.attempt.check_deadlines()
    assert rig.calls == ["b"] * 3, "it may be starting again"
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
    assert rig.calls == ["b", "s", *["b"] * 3]
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
