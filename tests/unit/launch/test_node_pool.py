"""Nodes in the places of lost ones: while the workers of the others wait, and before the next attempt."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.errors import ConnectError, NodeFailures
from dtctl.launch.control import node_pool, spare_pool
from dtctl.launch.control.node_pool import KEPT, LIVE, NodePool, ReconnectPolicy, ReplacementNode
from dtctl.launch.control.session import LinkLost, NodeMessage, NodeSession, SessionFailed
from dtctl.launch.control.spare_pool import SparePool, WorkerNotReplaced
from dtctl.launch.records.events import Event, NodeChanged, Note, WorkersReplaced
from dtctl.supervisor.messages.base import Refusal
from dtctl.supervisor.messages.setup import NodeDescription, NodeReady
from tests.unit.launch.test_gang import Deaf, Rig
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
        self.spares = list(spares)
        healing = self.attempt.losses.healing
        assert healing is not None
        healing._place = self.place
        pool = NodePool(self.gang, SparePool(self.spares, self.events.append), self.call, self.warm_up)
        self.pool = self.attempt.losses.pool = healing._pool = pool

    @property
    def complaints(self) -> list[tuple[str, str]]:
        """Spares that cannot stand by, and why."""
        notes = [(event.node or "", event.text.split(": ")) for event in self.events if isinstance(event, Note)]
        return [(node, text[1]) for node, text in notes if text[0] == "this spare cannot wait in readiness"]

    def warm_up(self, session: NodeSession, description: NodeDescription) -> None:
        assert description is DESCRIPTION
        if not self.is_fit:
            raise WorkerNotReplaced("too few GPUs")
        self.warmed_up.append(session.name)

    def call(self, name: str, _rule: ReconnectPolicy) -> Called:
        self.calls.append(name)
        self.called = Called(name, queue.Queue())
        return self.called

    def place(self, substitute: ReplacementNode, epoch: int) -> None:
        name, order = substitute.session.name, list(self.gang.sessions)
        order[order.index(substitute.lost)] = name
        sessions = self.gang.sessions | {name: substitute.session}
        self.gang.sessions = {each: sessions[each] for each in order}
        nodes = [replace(node, name=name) if node.name == substitute.lost else node for node in self.plan.nodes]
        self.attempt.nodes.replace_node(substitute.lost, name, replace(self.plan, nodes=tuple(nodes)))
        assert isinstance(substitute.session, Deaf)
        self.nodes[name] = substitute.session
        self.started = (name, epoch)

    def becomes_ready(self, session: Deaf) -> None:
        self.attempt.handle(NodeMessage(session, DESCRIPTION))
        self.attempt.handle(NodeMessage(session, NodeReady()))


def test_a_lost_node_that_answers_has_its_place_again(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.tell("b", LinkLost("gone"))
    assert rig.calls == ["b"]
    assert [rig.heals(node)[-1].lost for node in "ac"] == [[1], [1]]
    assert rig.attempt.nodes.open == {"a", "b", "c"}
    rig.attempt.deadlines.check()
    rig.becomes_ready(rig.called)
    assert rig.started == ("b", 1)
    rig.say("b", "started", interface="")
    rig.report("a", "hosting", port=5)
    rig.all_do("ready", 1)
    assert [(message.epoch, message.port) for message in rig.joins("b")] == [(1, 5)]
    rig.all_do("joined", 1)
    [healed] = [event for event in rig.events if isinstance(event, WorkersReplaced)]
    assert [(each.rank, each.node, each.by) for each in healed.replaced] == [(1, "b", "b")]
    assert rig.spares == ["s"]
    states = [event.state for event in rig.events if isinstance(event, NodeChanged) and event.node == "b"]
    assert states == ["started", "lost", "started"]


def test_a_spare_is_called_when_the_node_fails_or_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = NodesRig(tmp_path, "s", "t")
    rig.tell("b", LinkLost("gone"))
    lost = rig.called
    rig.pool._searches["b"].began_s -= 3.0
    rig.attempt.deadlines.check()
    assert rig.calls == ["b", "s"]
    rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
    rig.attempt.deadlines.check()
    assert rig.calls[2:] == ["t"]
    rig.becomes_ready(rig.called)
    assert rig.started == ("t", 1)
    assert lost.closed
    assert rig.attempt.nodes.open == {"a", "t", "c"}
    assert rig.attempt.nodes.ranks["t"] == {1}


def test_a_spare_that_was_not_needed_can_be_called_again(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    found = rig.pool
    for _ in range(2):
        rig.calls.clear()
        assert found.search("b", LIVE) is None
        lost = rig.called
        found._searches["b"].began_s -= 3.0
        found.check()
        for content in (DESCRIPTION, NodeReady()):
            substitute = found.handle_called_node_message(NodeMessage(lost, content))
        assert substitute is not None
        assert rig.calls == ["b", "s"]
        assert rig.called.closed
        assert rig.spares == ["s"]


def test_a_spare_that_stands_by_takes_the_place_at_once_and_the_lost_node_is_a_spare_then(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.attempt.deadlines.check()
    rig.becomes_ready(rig.called)
    assert rig.warmed_up == ["s"]
    rig.attempt.deadlines.check()
    assert rig.calls == ["s"]
    rig.tell("b", LinkLost("gone"))
    assert rig.calls == ["s"]
    assert rig.started == ("s", 1)
    assert rig.attempt.nodes.open == {"a", "s", "c"}
    assert rig.spares == ["b"]


def test_two_spares_stand_by_and_then_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = NodesRig(tmp_path, "s", "t", "u")
    monkeypatch.setattr(spare_pool, "RETIRED_S", 1000.0)
    rig.attempt.deadlines.check()
    assert rig.calls == ["s", "t"]
    rig.becomes_ready(rig.called)
    rig.tell("b", LinkLost("gone"))
    assert rig.started == ("t", 1), "the one that is ready"
    rig.attempt.deadlines.check()
    assert rig.calls == ["s", "t", "u"]
    assert rig.spares == ["b"], "it was lost a moment ago"


def test_a_spare_that_does_not_fit_is_told_of_and_not_called_again(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.is_fit = False
    rig.attempt.deadlines.check()
    rig.becomes_ready(rig.called)
    assert rig.complaints == [("s", "too few GPUs")]
    rig.attempt.deadlines.check()
    assert (rig.calls, rig.spares) == (["s"], [])


def test_a_spare_that_is_silent_is_not_relied_upon(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.attempt.deadlines.check()
    standby = rig.called
    rig.becomes_ready(standby)
    standby.last_heard -= spare_pool.FRESH_S + 1
    rig.tell("b", LinkLost("gone"))
    assert standby.closed
    assert rig.calls == ["s", "b"]
    assert rig.spares == ["s"]
    rig.becomes_ready(rig.called)
    assert rig.started == ("b", 1)


def test_a_spare_that_is_not_ready_yet_takes_part_in_the_search(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.attempt.deadlines.check()
    standby = rig.called
    rig.attempt.handle(NodeMessage(standby, DESCRIPTION))
    rig.tell("b", LinkLost("gone"))
    rig.attempt.handle(NodeMessage(standby, NodeReady()))
    assert rig.started == ("s", 1)
    assert rig.warmed_up == []
    assert rig.called.closed, "the lost node was called, too"
    assert rig.spares == ["b"]


def test_a_spare_that_cannot_stand_by_is_told_of_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.attempt.deadlines.check()
    rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
    assert rig.complaints == [("s", "off")]
    rig.attempt.deadlines.check()
    assert rig.calls == ["s"], "not at once"
    monkeypatch.setattr(spare_pool, "FAILED_S", -1.0)
    rig = NodesRig(tmp_path, "s")
    for content in (Refusal(code="disk-full", message="1 MiB is left"), LinkLost(""), LinkLost("")):
        rig.attempt.deadlines.check()
        rig.attempt.handle(NodeMessage(rig.called, content))
    assert rig.calls == ["s", "s", "s"]
    assert rig.complaints == [("s", "1 MiB is left")]
    assert rig.spares == ["s"]


def test_whoever_stands_by_is_sent_away_at_the_end(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path, "s")
    rig.attempt.deadlines.check()
    rig.becomes_ready(rig.called)
    rig.attempt.nodes.interrupt(2, hard=False)
    for node in "abc":
        rig.stopped(node)
    rig.attempt.close()
    assert [message.op for message in rig.called.sent] == ["quit"]
    assert rig.called.closed
    assert rig.spares == ["s"]
    assert rig.attempt.nodes.outcome.left_behind == {"a": 0, "b": 0, "c": 0}


def test_a_kept_run_calls_a_lost_node_again_until_it_answers(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    called: list[Called] = []

    def call(name: str, rule: ReconnectPolicy) -> Called:
        assert rule is KEPT
        called.append(Called(name, rig.inbox))
        return called[-1]

    def refuse() -> None:
        rig.attempt.handle(NodeMessage(called[-1], SessionFailed(ConnectError("refused", node="b"))))

    pool = NodePool(rig.gang, SparePool(["s"], rig.events.append), call, lambda *_: None)
    rig.attempt.losses.pool, rig.attempt.nodes.keeps_nodes = pool, True
    rig.tell("b", LinkLost(""))
    assert (rig.attempt.nodes.outcome.lost_nodes, rig.sent_to("a")) == ([], []), "it goes on by itself"
    for tries in range(3):
        rig.attempt.deadlines.check()
        assert len(called) == tries + 1, "one try at a time"
        refuse()
        rig.attempt.deadlines.check()
        assert len(called) == tries + 1, "not at once"
        pool._searches["b"].next_call_s = 0.0
    rig.attempt.deadlines.check()
    rig.attempt.handle(NodeMessage(called[-1], NodeReady()))
    assert (pool.vacant, rig.gang.sessions["b"]) == (set(), called[-1])
    rig.nodes["b"] = called[-1]
    rig.tell("b", LinkLost(""))
    pool._searches["b"].began_s -= 4000
    refuse()
    rig.attempt.deadlines.check()
    assert rig.attempt.nodes.outcome.lost_nodes == ["b"], "after an hour it is"
    assert {session.name for session in called} == {"b"}, "no spare takes the place"


def test_a_kept_node_that_is_away_when_the_run_is_stopped_is_told_once_it_answers(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    called = Called("b", rig.inbox)
    pool = NodePool(rig.gang, SparePool([], rig.events.append), lambda *_: called, lambda *_: None)
    rig.attempt.losses.pool, rig.attempt.nodes.keeps_nodes = pool, True
    rig.tell("b", LinkLost(""))
    rig.attempt.nodes.interrupt(15, hard=False)
    rig.attempt.handle(NodeMessage(called, NodeReady()))
    assert [message.op for message in called.sent] == ["stop"]


class RestartRig(Rig):
    """Three nodes between two attempts; a node answers if the test says so, as soon as it is called."""

    def __init__(self, folder: Path, spares: str, answers: str) -> None:
        super().__init__(folder)
        self.answers, self.calls = set(answers), list[str]()
        self.pool = NodePool(self.gang, SparePool(list(spares), self.events.append), self.call, lambda *_: None)

    def call(self, name: str, _rule: ReconnectPolicy) -> Called:
        self.calls.append(name)
        session = Called(name, self.inbox)
        works = (DESCRIPTION, NodeReady()) if name in self.answers else (SessionFailed(ConnectError("off", node=name)),)
        for content in works:
            self.inbox.put(NodeMessage(session, content))
        return session

    def choose(self, lost: str, *, min_nodes: int = 3, return_s: float = 0.0) -> tuple[str, ...]:
        chosen = self.pool.choose_nodes(set(lost), min_nodes=min_nodes, return_s=return_s)
        assert chosen.names == tuple(self.gang.sessions)
        return chosen.names


@pytest.mark.parametrize(
    ("lost", "spares", "answers", "min_nodes", "chosen"),
    [
        ("b", "s", "bs", 3, "abc"),
        ("b", "s", "s", 3, "asc"),
        ("bc", "st", "ct", 3, "atc"),
        ("bc", "st", "st", 3, "ast"),
        ("b", "s", "", 2, "ac"),
        ("bc", "s", "s", 2, "as"),
        ("ac", "", "", 1, "b"),
    ],
)
def test_the_nodes_of_the_next_attempt(
    tmp_path: Path, lost: str, spares: str, answers: str, min_nodes: int, chosen: str
) -> None:
    rig = RestartRig(tmp_path, spares, answers)
    names = rig.choose(lost, min_nodes=min_nodes)
    assert sorted(names) == sorted(chosen)
    assert [name for name in names if name in "abc"] == [name for name in "abc" if name in chosen], "ranks are kept"
    assert not set(rig.pool.spares.names) & set(names)


def test_nodes_that_the_run_needs_are_all_named(tmp_path: Path) -> None:
    rig = RestartRig(tmp_path, "s", "")
    with pytest.raises(NodeFailures) as caught:
        rig.choose("bc", min_nodes=2)
    assert {"b", "c"} >= set(caught.value.failures) > set()


def test_a_node_that_the_run_needs_is_called_until_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = RestartRig(tmp_path, "", "")
    monkeypatch.setattr(node_pool, "FIRST_WAIT_S", 0.01)

    def emit(event: Event) -> None:
        rig.events.append(event)
        if isinstance(event, Note) and rig.calls.count("b") == 3:
            rig.answers.add("b")

    rig.gang.emit = emit
    assert rig.choose("b", return_s=60.0) == ("a", "b", "c")
    assert rig.calls == ["b"] * 4
    notes = [event.text for event in rig.events if isinstance(event, Note)]
    assert notes[0] == "retrying in 0.01 s, since the run needs this node: off"
    assert len(notes) == 3
    states = [event.state for event in rig.events if isinstance(event, NodeChanged)]
    assert states == ["failed"] * 3 + ["hello", "ready"]


def test_when_nobody_can_take_the_place_all_are_stopped_and_the_node_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = NodesRig(tmp_path)
    rig.tell("b", LinkLost("gone"))
    monkeypatch.setattr(node_pool, "FIRST_WAIT_S", -1.0)
    for _ in range(2):
        rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
        rig.attempt.deadlines.check()
    assert rig.calls == ["b"] * 3, "it may be starting again"
    rig.pool._searches["b"].began_s -= 20.0
    rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
    rig.attempt.deadlines.check()
    assert [rig.sent_to(node)[-1] for node in "ac"] == ["stop", "stop"]
    assert rig.attempt.nodes.outcome.lost_nodes == ["b"]
    assert rig.attempt.nodes.open == {"a", "c"}
    [failure] = rig.attempt.nodes.outcome.failures
    assert (failure.node, failure.rank) == ("b", None)
    assert any("off" in event.text for event in rig.events if isinstance(event, Note))


def test_a_node_that_fails_at_once_leaves_its_place_to_one_spare_and_is_called_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = NodesRig(tmp_path, "s", "t")
    rig.tell("b", LinkLost("gone"))
    monkeypatch.setattr(node_pool, "FIRST_WAIT_S", -1.0)
    for _ in range(3):
        rig.attempt.handle(NodeMessage(rig.called, SessionFailed(OSError("off"))))
        rig.attempt.deadlines.check()
    assert rig.calls == ["b", "s", *["b"] * 3]
    assert rig.spares == ["t"]


def test_a_run_that_is_stopped_while_a_node_is_replaced_does_not_wait_for_it(tmp_path: Path) -> None:
    rig = NodesRig(tmp_path)
    rig.tell("b", LinkLost("gone"))
    rig.attempt.nodes.interrupt(2, hard=False)
    for node in "ac":
        rig.stopped(node)
    assert not rig.attempt.nodes.open
    assert rig.called.closed
    assert rig.attempt.nodes.outcome.lost_nodes == ["b"]
    assert rig.attempt.nodes.outcome.left_behind == {"a": 0, "b": None, "c": 0}


def test_connections_that_broke_without_a_loss_are_made_anew(tmp_path: Path) -> None:
    rig = LiveRig(tmp_path)
    rig.report("c", "cut", 0)
    rig.attempt.deadlines.check()
    assert not rig.heals("a"), "whoever is lost is known first"
    rig.attempt.nodes.link_timeout_s = -3.0
    for session in rig.nodes.values():
        session.last_heard = float("inf")
    rig.attempt.deadlines.check()
    assert [rig.heals(node)[0].lost for node in "abc"] == [[], [], []]
    rig.report("a", "hosting", port=5)
    rig.all_do("ready", 1, newcomers="")
    rig.all_do("joined", 1, newcomers="")
    [healed] = [event for event in rig.events if isinstance(event, WorkersReplaced)]
    assert (healed.replaced, len(healed.survivors)) == ((), 3)
    assert rig.attempt.nodes.outcome.failures == []
