"""The gang rule, message by message: what each one changes, and what the other nodes are told."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtctl.errors import ConnectError, NodeError, NodeFailures
from dtctl.launch.control import node_sessions
from dtctl.launch.control.attempt import Attempt
from dtctl.launch.control.failure import find_root_failure
from dtctl.launch.control.hang import HangMonitor
from dtctl.launch.control.link import NodeLink
from dtctl.launch.control.node_sessions import NodeSessions
from dtctl.launch.control.session import Content, LinkLost, NodeMessage, NodeSession, NodeSetup, SessionFailed
from dtctl.launch.control.worker_replacement import WorkerReplacement
from dtctl.launch.records.events import Event, Note, RunStopping, WorkerExited
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.logs import RunLogs
from dtctl.launch.records.run_writer import RunWriter
from dtctl.plan.build import PlanFacts, build
from dtctl.plan.model import Plan
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes
from dtctl.supervisor import frames
from dtctl.supervisor.messages.attempt import WHILE_RUNNING, StopAttempt, WorkerExit
from dtctl.supervisor.messages.base import Message, StillWorking, parse_message_document
from dtctl.supervisor.messages.setup import NodeDescription, NodeReady, Prepare
from dtctl.transport.base import Connection, Target
from dtctl.transport.local import LocalTransport
from tests.facts import missing, raises

SPEC = "cluster: {transport: ssh, nodes: [a, b, c], slots: 1}\njob: {script: t.py, kind: direct, grace_s: 7}\n"
PREPARE = Prepare(run="r", fresh=True, cwd="", pushed=False, files=[], programs=[])
ERRAND = NodeSetup(python=None, workdir="/w", ports=(), push=None, prepare=lambda _cwd: PREPARE)


class Deaf(NodeSession):
    """A session that was never started: keeps what it was to send."""

    def __init__(self, name: str, inbox: queue.Queue[NodeMessage]) -> None:
        super().__init__(Target(name=name, address=name), LocalTransport(), ERRAND, inbox)
        self.sent: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> bool:
        if message.op != "ping":
            self.sent.append(message)
        return True

    def close(self) -> None:
        self.closed = True


class Rig:
    """A gang of three nodes that all have been sent their start."""

    def __init__(self, folder: Path, *, heal_s: float | None = None) -> None:
        spec = parse_spec(SPEC, source="dtctl.yaml", base_dir=folder)
        self.plan: Plan = build(spec, resolve_nodes(spec), run="r", facts=PlanFacts())
        self.events: list[Event] = []
        self.inbox: queue.Queue[NodeMessage] = queue.Queue()
        self.nodes = {name: Deaf(name, self.inbox) for name in "abc"}
        logs = RunLogs(RunWriter(folder))
        self.gang = NodeSessions([*self.nodes.values()], self.inbox, logs=logs, emit=self.events.append)
        self.standings: list[Any] = []
        hang_monitor = HangMonitor(
            node_of_rank=dict(enumerate("abc")),
            limit=5.0,
            start_limit=60.0,
            folder=folder / "hangs",
            on_progress=self.standings.extend,
        )
        self.ledger = Ledger(time.monotonic)
        healing = None
        if heal_s is not None:
            ranks = dict(enumerate("abc"))
            healing = WorkerReplacement(
                self.gang, ranks, limit_s=heal_s, ledger=self.ledger, address="10.0.0.{}".format
            )
        self.attempt = Attempt(self.gang, self.plan, 30.0, hang_monitor=hang_monitor, healing=healing)

    def say(self, node: str, op: str, **fields: Any) -> None:
        """What a node has sent."""
        self.tell(node, parse_message_document({"op": op, **fields}, WHILE_RUNNING))

    def tell(self, node: str, content: Content) -> None:
        """What a session says of itself."""
        self.attempt.handle(NodeMessage(self.nodes[node], content))

    def exit(self, node: str, code: int = 0, signal: int | None = None) -> None:
        self.say(node, "exit", rank="abc".index(node), code=code, signal=signal, time=0.0)

    def stopped(self, node: str, left: int = 0) -> None:
        self.say(node, "stopped", exits=[], left=left)

    def sent_to(self, node: str) -> list[str]:
        return [message.op for message in self.nodes[node].sent]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_run_in_which_all_goes_well(rig: Rig) -> None:
    for node in "abc":
        assert not rig.attempt.nodes.all_started
        rig.say(node, "started", interface="eth0")
    assert rig.attempt.nodes.all_started
    for node in "abc":
        rig.exit(node)
        assert rig.attempt.nodes.open
        rig.stopped(node)
    assert not rig.attempt.nodes.open
    assert rig.attempt.nodes.outcome.failures == []
    assert rig.attempt.nodes.outcome.left_behind == {"a": 0, "b": 0, "c": 0}
    assert rig.sent_to("a") == []


def test_the_first_failure_ends_the_others_once(rig: Rig) -> None:
    rig.exit("b", code=3)
    rig.exit("c", code=143, signal=15)
    assert [rig.sent_to(node) for node in "abc"] == [["stop"], ["stop"], ["stop"]]
    assert [(f.node, f.rank, f.exit_code, f.signal) for f in rig.attempt.nodes.outcome.failures] == [
        ("b", 1, 3, None),
        ("c", 2, 143, 15),
    ]
    assert [event.reason for event in rig.events if isinstance(event, RunStopping)] == [
        "rank 1 on b ended with exit code 3"
    ]


def test_a_worker_that_ends_well_does_not_stop_the_others(rig: Rig) -> None:
    rig.exit("b")
    assert rig.sent_to("a") == []


def test_a_worker_that_dtctl_has_killed_has_not_failed(rig: Rig) -> None:
    rig.exit("b", code=3)
    rig.say("c", "exit", rank=2, code=137, signal=9, time=0.0, told=True, killed=True)
    assert [failure.node for failure in rig.attempt.nodes.outcome.failures] == ["b"]
    exits = [event for event in rig.events if isinstance(event, WorkerExited)]
    assert [(event.node, event.signal, event.killed) for event in exits] == [("b", None, None), ("c", 9, True)]


def test_a_worker_that_was_killed_without_a_cause_that_is_known_is_the_failure(rig: Rig) -> None:
    """Somebody has told its supervisor to end, and a run without that worker has not succeeded."""
    rig.say("c", "exit", rank=2, code=137, signal=9, time=0.0, told=True, killed=True, why="dtctl killed it")
    (failure,) = rig.attempt.nodes.outcome.failures
    assert (failure.node, failure.signal, failure.node_reason) == ("c", 9, "dtctl killed it")
    assert rig.sent_to("a") == ["stop"]


def test_an_exit_that_is_told_twice_counts_once(rig: Rig) -> None:
    rig.exit("b", code=3)
    fact = {"rank": 1, "code": 3, "signal": None, "time": 0.0}
    rig.say("b", "stopped", exits=[fact], left=0)
    assert len(rig.attempt.nodes.outcome.failures) == 1
    late = {"rank": 2, "code": 9, "signal": None, "time": 0.0}
    rig.say("c", "stopped", exits=[late], left=0)
    assert len(rig.attempt.nodes.outcome.failures) == 2, "and one that was only told at the end counts too"


def test_a_lost_node_is_a_failure_and_is_not_waited_for(rig: Rig) -> None:
    rig.tell("c", LinkLost(""))
    assert rig.attempt.nodes.outcome.lost_nodes == ["c"]
    assert rig.attempt.nodes.outcome.left_behind == {"c": None}
    assert rig.attempt.nodes.open == {"a", "b"}
    (failure,) = rig.attempt.nodes.outcome.failures
    assert (failure.node, failure.exit_code, failure.summary) == ("c", None, "the link was lost")
    assert rig.sent_to("a") == ["stop"]
    rig.exit("c", code=5)
    assert len(rig.attempt.nodes.outcome.failures) == 1, "what it says after it was given up does not count"


def test_a_node_that_is_lost_while_all_are_stopped_is_no_failure_of_its_own(rig: Rig) -> None:
    rig.exit("a", code=1)
    rig.tell("c", LinkLost(""))
    assert [failure.node for failure in rig.attempt.nodes.outcome.failures] == ["a"]
    assert rig.attempt.nodes.outcome.left_behind == {"c": None}


def test_a_lost_node_whose_workers_have_told_the_others_to_stop_is_the_first_failure(rig: Rig) -> None:
    rig.exit("a", code=75)
    rig.exit("b", code=75)
    rig.tell("c", LinkLost("connection closed"))
    found = find_root_failure(rig.attempt.nodes.outcome.failures)
    assert found is not None
    assert (found.node, found.exit_code) == ("c", None)


def test_an_error_of_a_node_fails_the_attempt_and_what_is_left_there_is_to_be_looked_at(rig: Rig) -> None:
    rig.say("a", "error", code="disk-full", message="No space left: /w")
    (failure,) = rig.attempt.nodes.outcome.failures
    assert failure.summary == "the disk is full: No space left: /w"
    assert rig.attempt.nodes.outcome.left_behind == {"a": None}
    assert rig.sent_to("b") == ["stop"]


def test_the_user_stops_once_gently_and_twice_at_once(rig: Rig) -> None:
    rig.attempt.nodes.interrupt(2, hard=False)
    rig.attempt.nodes.interrupt(2, hard=False)
    assert rig.nodes["a"].sent == [StopAttempt(requested=True)]
    rig.exit("a", code=130, signal=2)
    assert rig.attempt.nodes.outcome.failures == [], "what ends because the user stops it has not failed"
    rig.attempt.nodes.interrupt(2, hard=True)
    assert rig.nodes["a"].sent[-1] == StopAttempt(now=True, requested=True)
    assert rig.attempt.nodes.outcome.stopped_by == 2


def test_silence_is_the_loss_of_a_node(rig: Rig) -> None:
    for node in "abc":
        rig.say(node, "started")
        rig.nodes[node].last_heard = time.monotonic()
    rig.attempt.nodes.begun_at -= 100
    rig.nodes["b"].last_heard -= 31
    rig.attempt.deadlines.check()
    assert rig.attempt.nodes.outcome.lost_nodes == ["b"]
    assert rig.nodes["b"].closed
    assert not rig.nodes["a"].closed
    assert not missing(rig.attempt.nodes.outcome.failures[0].summary, "30 s")


class Unreachable(LocalTransport):
    """A transport by which no new connection comes to be."""

    def connect(self, target: Target) -> Connection:
        raise ConnectError("no route", node=target.name)


@pytest.mark.parametrize(
    ("answers", "silent_s", "lost"), [(True, 31, False), (True, 61, True), (False, 31, True), (True, 12, False)]
)
def test_without_spares_a_new_connection_decides_whether_a_silent_node_is_lost(
    rig: Rig, answers: bool, silent_s: float, lost: bool
) -> None:
    rig.attempt.deadlines.confirms_silence = True
    for node in "abc":
        rig.say(node, "started")
        rig.nodes[node].last_heard = time.monotonic()
    rig.attempt.nodes.begun_at -= 100
    if not answers:
        rig.nodes["b"].second_call._transport = Unreachable()
    rig.nodes["b"].last_heard -= silent_s
    deadline = time.monotonic() + 10
    while silent_s > 30 and rig.nodes["b"].second_call.is_answered() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    rig.attempt.deadlines.check()
    assert rig.attempt.nodes.outcome.lost_nodes == (["b"] if lost else [])
    if lost:
        assert not missing(rig.attempt.nodes.outcome.failures[0].summary, "60 s" if answers else "30 s")
    rig.nodes["b"].last_heard = time.monotonic()
    rig.attempt.deadlines.check()
    assert rig.nodes["b"].second_call._answer is None or lost, "the next silence asks anew"


def test_a_node_that_does_not_start_in_time_is_lost(rig: Rig) -> None:
    for node in "abc":
        rig.nodes[node].last_heard = time.monotonic()
    rig.say("a", "started")
    rig.say("b", "started")
    rig.attempt.nodes.begun_at -= 31
    rig.attempt.deadlines.check()
    assert rig.attempt.nodes.outcome.lost_nodes == ["c"]
    assert not missing(rig.attempt.nodes.outcome.failures[0].summary, "30 s")


def test_a_node_that_does_not_stop_in_time_is_given_up(rig: Rig) -> None:
    rig.exit("a", code=1)
    for node in "abc":
        rig.say(node, "started")
        rig.nodes[node].last_heard = time.monotonic()
    assert rig.attempt.nodes.stop_deadline is not None
    assert rig.attempt.nodes.stop_deadline - time.monotonic() > rig.plan.grace_s
    rig.attempt.deadlines.check()
    assert rig.attempt.nodes.open == set("abc")
    rig.attempt.nodes.stop_deadline = time.monotonic() - 1
    rig.attempt.deadlines.check()
    assert not rig.attempt.nodes.open
    assert [failure.node for failure in rig.attempt.nodes.outcome.failures] == ["a"]


def test_the_old_link_of_a_node_that_has_a_new_one_is_not_heard(rig: Rig) -> None:
    old = rig.nodes["b"]
    rig.gang.sessions["b"] = Deaf("b", rig.inbox)
    rig.attempt.handle(NodeMessage(old, WorkerExit(rank=1, code=1, signal=None)))
    assert rig.attempt.nodes.outcome.failures == []


def test_nodes_that_cannot_be_made_ready_are_all_named(rig: Rig) -> None:
    for node, error in (("c", NodeError("no Python", node="c")), ("a", ConnectError("refused", node="a"))):
        rig.inbox.put(NodeMessage(rig.nodes[node], SessionFailed(error)))
    rig.inbox.put(NodeMessage(rig.nodes["b"], NodeDescription(gpus=0, address="", port=0)))
    rig.inbox.put(NodeMessage(rig.nodes["b"], NodeReady()))
    with pytest.raises(NodeFailures) as caught:
        rig.gang.gather()
    assert list(caught.value.failures) == ["a", "c"]


def test_a_bug_in_a_session_is_told_as_one(rig: Rig) -> None:
    for node in "abc":
        content = SessionFailed(KeyError("x")) if node == "b" else NodeReady()
        rig.inbox.put(NodeMessage(rig.nodes[node], content))
    with raises(Exception, "KeyError") as caught:
        rig.gang.gather()
    assert "bug in dtctl" in str(getattr(caught.value, "hint", ""))
    assert type(caught.value.__cause__) is KeyError


def worker(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "rank": rank, "pid": 10 + rank, "signal": 40, "phase": 1, "step": 8, "place": 2, "first": 0, "saved": 4,
        "until": 20, "begun_s": 60.0, "stale_s": 9.0, "slowest_s": 0.1, "stall_s": 0.0, "evaluation_s": 0.0,
        "state": "S", **more,
    }  # fmt: skip


def test_who_hangs_is_asked_named_and_ended_at_once(rig: Rig, tmp_path: Path) -> None:
    for node, place in zip("abc", (2, 1, 2), strict=True):
        rig.say(node, "started")
        rig.nodes[node].last_heard = time.monotonic()
        rig.say(node, "pong", workers=[worker("abc".index(node), place=place)])
    assert [standing.rank for standing in rig.standings] == [0, 1, 2]
    rig.attempt.deadlines.check()
    assert [rig.sent_to(node) for node in "abc"] == [["stacks"]] * 3
    rig.attempt.deadlines.check()
    assert rig.attempt.nodes.outcome.failures == [], "nobody has answered yet"
    for node in "abc":
        rig.say(node, "pong", workers=[worker("abc".index(node), stale_s=0.0)])  # too late to matter
        text = f'Stack (most recent call first):\n  File "/{node}.py", line 3 in f\n'
        rig.say(node, "stack", rank="abc".index(node), pid=1, state="S", how="faulthandler", text=text, flight="{}")
        rig.say(node, "stacks-end")
    rig.attempt.deadlines.check()
    (failure,) = rig.attempt.nodes.outcome.failures
    assert (failure.node, failure.rank, failure.exit_code, failure.hang) == ("b", 1, None, True)
    assert failure.summary == (
        "no progress for 9 s in step 9: rank 1 on b is stuck in a forward pass at /b.py:3 in f; "
        "the 2 others wait for it"
    )
    assert (rig.attempt.nodes.outcome.hung_s, rig.attempt.nodes.outcome.last_step) == (9.0, 8)
    assert all(rig.nodes[node].sent[-1] == StopAttempt(now=True) for node in "abc")
    assert "/b.py" in Path(failure.log).read_text()
    assert (tmp_path / "hangs" / "c" / "trace_rank_2.json").read_text() == "{}"


def test_a_node_that_cannot_show_stacks_is_not_waited_for_longer_than_it_may_take(rig: Rig) -> None:
    for node in "abc":
        rig.say(node, "started")
        rig.nodes[node].last_heard = time.monotonic()
        rig.say(node, "pong", workers=[worker("abc".index(node))])
    rig.attempt.deadlines.check()
    for node in "ab":
        rig.say(node, "stacks-end")
    rig.attempt.deadlines.check()
    assert rig.attempt.nodes.outcome.failures == []
    rig.attempt.hang_monitor._deadline = time.monotonic() - 1
    rig.attempt.deadlines.check()
    assert rig.attempt.nodes.outcome.failures[0].rank is None, "no stacks, all at the same place: nobody is named"


def test_a_worker_that_has_ended_in_time_is_not_waited_for(rig: Rig) -> None:
    for node in "abc":
        rig.say(node, "started")
        rig.nodes[node].last_heard = time.monotonic()
        mine = {"step": 20, "phase": 5, "state": ""} if node == "a" else {"step": 19, "stale_s": 0.0}
        rig.say(node, "pong", workers=[worker("abc".index(node), **mine)])
    rig.exit("a")
    rig.attempt.deadlines.check()
    assert rig.sent_to("b") == []


def test_who_left_early_is_known_from_before_the_others_were_stopped(rig: Rig) -> None:
    ending = {"phase": 5, "state": ""}
    rig.say("a", "progress", workers=[worker(0, stale_s=0.1, **ending)])
    rig.exit("a", code=1)
    rig.say("b", "progress", workers=[worker(1, stale_s=0.5, **ending)], before_stop=True)
    rig.say("b", "progress", workers=[worker(1, step=9, **ending)])
    rig.say("c", "progress", workers=[worker(2)], before_stop=True)
    rig.say("c", "progress", workers=[worker(2, **ending)])
    rig.exit("b")
    rig.say("c", "exit", rank=2, code=143, signal=15, time=0.0, told=True)
    (left,) = rig.attempt.close().left_early
    assert (left.rank, left.step) == (1, 8)


def test_a_worker_that_has_ended_early_is_waited_for_in_vain(rig: Rig) -> None:
    for node in "abc":
        rig.say(node, "started")
        rig.nodes[node].last_heard = time.monotonic()
        rig.say(node, "pong", workers=[worker("abc".index(node), stale_s=0.0 if node == "a" else 9.0)])
    rig.attempt.deadlines.check()
    assert rig.sent_to("b") == []
    rig.exit("a")
    rig.attempt.deadlines.check()
    assert rig.sent_to("b") == ["stacks"]


class Mute:
    """A stream over which a node sends what the test gives it, and nothing else."""

    def __init__(self) -> None:
        self.chunks: queue.Queue[bytes] = queue.Queue()

    def read(self, _size: int) -> bytes:
        return self.chunks.get(timeout=20)

    def write(self, data: bytes) -> None: ...


@pytest.mark.parametrize(
    ("described", "passed_s", "notes", "failed"),
    [(False, 3, 0, False), (False, 6, 1, False), (False, 121, 1, True), (True, 6, 0, False), (True, 601, 0, True)],
)
def test_a_node_that_accepts_the_connection_and_sends_nothing_is_named_and_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, described: bool, passed_s: float, notes: int, failed: bool
) -> None:
    node = rig.nodes["b"]
    node.is_described, node.last_progress = described, time.monotonic() - passed_s
    turns = iter([None, None, signal.SIGINT])

    def next_message(_timeout_s: float) -> None:
        if (number := next(turns)) is not None:
            rig.gang.signals.append(number)

    monkeypatch.setattr(rig.gang, "next_message", next_message)
    _, failures = rig.gang.try_gather({"b"})
    assert sum(isinstance(event, Note) for event in rig.events) == notes
    assert (list(failures) == ["b"]) is failed
    if failed:
        assert failures["b"].node == "b"
        assert ("120 s" in str(failures["b"])) is not described


def test_only_a_node_that_owes_an_answer_can_be_too_silent(rig: Rig) -> None:
    node, stream = rig.nodes["b"], Mute()
    link = NodeLink(stream, node="b")  # type: ignore[arg-type]
    node._asked, node.is_described, node.last_progress = link, True, time.monotonic()
    node.last_heard = 0.0
    assert node.silent_s() == 0.0, "it was not asked"
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(link.receive_json()))
    thread.start()
    wait_for(lambda: link.waiting_since is not None)
    first = link.waiting_since
    stream.chunks.put(frames.pack_json(StillWorking()))
    wait_for(lambda: link.waiting_since not in (None, first))
    assert link.waiting_since is not None
    link.waiting_since -= node_sessions.PUSH_SILENCE_S + 1
    assert rig.gang.find_stall(node) is not None
    stream.chunks.put(frames.pack_json(NodeReady()))
    thread.join(10)
    assert answers == [{"op": "ready"}]
    assert rig.gang.find_stall(node) is None


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
