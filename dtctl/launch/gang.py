"""One attempt of a run: all nodes are brought to the start, started together, watched, and ended together.

The gang rule: the first failure anywhere ends the attempt everywhere. Everything that happens arrives as a message in
one inbox, so this reads as a loop over messages; nothing here blocks on a single node.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dtctl.errors import ConnectError, DtctlError
from dtctl.launch.failure import Failure
from dtctl.launch.logs import METRICS, Logs
from dtctl.launch.session import Said, Session, error_of
from dtctl.plan.model import Plan
from dtctl.transport.fanout import raise_failures

PUSH_FACTS = ("sent", "files", "bytes", "state", "path")
PING_S = 1.0
QUIT_LIMIT_S = 2.0
CALL_AGAIN_S = 0.5
AWAY_LIMIT_S = 3600.0
"""How long a kept run's node may be out of reach before it counts as lost."""
START_LIMIT_S = 30.0
"""How long a node may take from the start message to its answer."""

Emit = Callable[..., None]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How an attempt ended."""

    failures: list[Failure] = field(default_factory=list)
    stopped_by: int | None = None
    """Signal that asked the launcher to stop; None when nobody did."""
    left: dict[str, int | None] = field(default_factory=dict)
    """Node -> processes left there; None when the node could not be asked."""
    lost: list[str] = field(default_factory=list)
    """Nodes whose link was lost."""
    gone: list[str] = field(default_factory=list)
    """Nodes where the run had ended before this launcher came; no supervisor waits there for another attempt."""


class Gang:
    """The sessions of all nodes of a run, in node rank order."""

    def __init__(self, sessions: list[Session], inbox: queue.Queue[Said], *, logs: Logs, emit: Emit) -> None:
        self.sessions = {session.name: session for session in sessions}
        self.inbox = inbox
        self.logs = logs
        self.emit = emit
        self.signals: list[int] = []
        """Signals that the launcher received, oldest first; appended to by the signal handler."""
        self.reattach: Callable[[str], None] | None = None
        """Opens a new link to a node that goes on by itself; None when losing the link ends the run there."""
        self._pinged = 0.0

    # -- to the start -----------------------------------------------------------------------------------------------

    def gather(self) -> dict[str, dict[str, Any]]:
        """Wait until every node is ready; node -> what it said about itself.

        Nothing has been started anywhere when this fails.

        Raises:
            DtctlError: of the one node that failed, or NodeFailures.
        """
        hellos, failures = self.try_gather(set(self.sessions))
        raise_failures(failures)
        return hellos

    def try_gather(self, names: set[str]) -> tuple[dict[str, dict[str, Any]], dict[str, DtctlError]]:
        """Wait until each of `names` is ready or has failed: what it said about itself, or why; in node rank order."""
        waiting = set(names)
        hellos: dict[str, dict[str, Any]] = {}
        failures: dict[str, DtctlError] = {}
        while waiting and not self.signals:
            said = self._next(0.2)
            if said is None or said.session is not self.sessions.get(said.session.name):
                continue  # nothing, or the last word of a link that has been replaced
            name = said.session.name
            if said.what == "hello":
                hellos[name] = said.data
            elif said.what == "failed":
                failures[name] = _as_ours(said.data["error"])
                waiting.discard(name)
                self.emit("node", node=name, state="failed", error=str(failures[name]))
                continue
            elif said.what == "ready":
                waiting.discard(name)
            facts = {key: value for key, value in said.data.items() if key in PUSH_FACTS}
            self.emit("node", node=name, state=said.what, **({"push": facts} if facts else {}))
        return hellos, {name: failures[name] for name in self.sessions if name in failures}

    def idle(self, seconds: float) -> None:
        """Wait, with all links kept alive, or until somebody wants to stop."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.signals:
            self._next(min(0.2, max(0.0, deadline - time.monotonic())))

    def probe(self, node: str, ports: tuple[int, ...]) -> int:
        """The first of `ports` that is free on `node`; 0 when none is, or the node does not answer."""
        session = self.sessions[node]
        session.send({"op": "probe", "ports": list(ports)})
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not self.signals:
            said = self._next(0.2)
            if said is not None and said.session is session and said.what == "probed":
                return int(said.data["port"])
        return 0

    # -- one attempt ------------------------------------------------------------------------------------------------

    def start(self, messages: dict[str, dict[str, Any]]) -> None:
        """Send every node its start message.

        Raises:
            ConnectError: a link was lost before its message was sent.
        """
        self.logs.begin_attempt()
        for name, message in messages.items():
            if not self.sessions[name].send({"op": "start", **message}):
                raise ConnectError("the link was lost before the start", node=name)

    def watch(self, plan: Plan, *, link_timeout_s: float, on_started: Callable[[], None] | None) -> Outcome:
        """Watch an attempt to its end on every node.

        Args:
            plan: the attempt.
            link_timeout_s: a node not heard of for this long is lost.
            on_started: called once, when every node has started its processes; None when they were started before.
        """
        attempt = _Attempt(self, plan, link_timeout_s, under_way=on_started is None)
        while attempt.open:
            if self.signals:
                attempt.interrupt(self.signals[-1], hard=len(self.signals) > 1)
            said = self._next(min(0.2, PING_S))
            if said is not None:
                attempt.take(said)
            if attempt.all_started and on_started is not None:
                on_started()
                attempt.all_started = False
            attempt.look_at_the_clock()
        for node, rank, text in self.logs.rest():
            self.emit("log", node=node, rank=rank, text=text)
        return attempt.outcome

    def quit(self) -> None:
        """Send every supervisor home, and wait until they have gone or had their time."""
        asked = [session for session in self.sessions.values() if session.send({"op": "quit"})]
        deadline = time.monotonic() + QUIT_LIMIT_S
        for session in asked:
            session.mute()  # a full inbox must not keep its thread from ending
        for session in asked:
            session.wait_closed(deadline - time.monotonic())

    def _next(self, timeout_s: float) -> Said | None:
        now = time.monotonic()
        if now - self._pinged >= PING_S:
            self._pinged = now
            for session in self.sessions.values():
                session.send({"op": "ping", "time": time.time()})
        try:
            return self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None


@dataclass(slots=True, kw_only=True)
class _Away:
    """A node that is to be called again."""

    since: float
    next: float
    tries: int = 0


class _Attempt:
    """Bookkeeping of one attempt: who has started, who has ended, who is still to be waited for."""

    def __init__(self, gang: Gang, plan: Plan, link_timeout_s: float, *, under_way: bool = False) -> None:
        self.gang = gang
        self.plan = plan
        self.link_timeout_s = link_timeout_s
        self.outcome = Outcome()
        self.open = {node.name for node in plan.nodes}
        self.starting = set() if under_way else set(self.open)
        self.quiet = set(self.open)
        """Nodes none of whose workers has printed anything: still at the rendezvous, for all we see."""
        self.all_started = False
        self.begun = time.monotonic()
        self.stop_deadline: float | None = None
        self.ended: set[tuple[str, int]] = set()
        self.away: dict[str, _Away] = {}
        """Nodes of a kept run whose link is gone: they go on, and are called again from time to time."""

    def take(self, said: Said) -> None:
        """Act on one message of a node that still belongs to the attempt."""
        name = said.session.name
        if said.what == "log":
            self._log(name, said.data["rank"], said.data["payload"])
        elif name not in self.open or said.session is not self.gang.sessions.get(name):
            return
        elif said.what == "started":
            self._started(name, said.data)
        elif said.what == "exit":
            self._exit(name, said.data)
        elif said.what == "ready":  # a kept run's link stands again
            self.away.pop(name, None)
            self.gang.emit("node", node=name, state="running")
        elif said.what == "stopped":
            for fact in said.data["exits"]:
                self._exit(name, fact)
            self.open.discard(name)
            self.outcome.left[name] = said.data["left"]
            if said.data.get("gone"):
                self.outcome.gone.append(name)
            self.gang.emit("node", node=name, state="stopped", left=said.data["left"])
        elif said.what == "cold":
            self.gang.emit("note", node=name, text=f"workers are started afresh: {said.data['why']}")
        elif said.what == "metrics-begin":
            self.gang.logs.begin_metrics(name)
        elif said.what == "error":
            self._fail(name, str(error_of(said.data, name)), exit_code=None)
            self._drop(name, left=0)
        elif said.what in ("lost", "failed"):
            text = said.data.get("stderr") or str(said.data.get("error", "")) or "the link was lost"
            self._lose(name, text)

    def _log(self, name: str, rank: int, payload: bytes) -> None:
        for text in self.gang.logs.write(name, rank, payload):
            self.gang.emit("log", node=name, rank=rank, text=text)
        # Metrics come from a step that all workers have taken part in, the silent ones too.
        for node in sorted(self.quiet if rank == METRICS else self.quiet & {name}):
            self.quiet.discard(node)
            self.gang.emit("node", node=node, state="running")

    def _started(self, name: str, data: dict[str, Any]) -> None:
        self.starting.discard(name)
        self.gang.emit("node", node=name, state="started", interface=data.get("interface") or None)
        self.all_started = not self.starting

    def _exit(self, name: str, data: dict[str, Any]) -> None:
        if (name, data["rank"]) in self.ended:
            return  # told again by the summary at the end, for those who missed it
        self.ended.add((name, data["rank"]))
        self.gang.emit("exit", node=name, rank=data["rank"], exit_code=data["code"], signal=data["signal"])
        if data["code"] and self.outcome.stopped_by is None:
            failure = Failure(
                node=name,
                rank=data["rank"] if data["rank"] >= 0 else None,
                exit_code=data["code"],
                signal=data["signal"],
                time=time.time(),
            )
            self.outcome.failures.append(failure)
            self._stop_others(f"{name} failed")

    def _lose(self, name: str, text: str) -> None:
        if self.gang.reattach is not None and self._call_again(name):
            return
        self.outcome.lost.append(name)
        if self.stop_deadline is None:
            self._fail(name, text, exit_code=None)
        self._drop(name, left=None)

    def _call_again(self, name: str) -> bool:
        """Plan the next try to reach a node that goes on without us; False when it is time to give it up."""
        now = time.monotonic()
        if name not in self.away:
            self.away[name] = _Away(since=now, next=now + CALL_AGAIN_S)
            self.gang.emit("node", node=name, state="away")
            return True
        away = self.away[name]
        away.tries += 1
        away.next = now + min(30.0, CALL_AGAIN_S * 2**away.tries)
        return now - away.since < AWAY_LIMIT_S

    def _fail(self, name: str, text: str, *, exit_code: int | None) -> None:
        failure = Failure(node=name, rank=None, exit_code=exit_code, signal=None, time=time.time(), summary=text)
        self.outcome.failures.append(failure)
        self._stop_others(f"{name}: {text}")

    def _drop(self, name: str, *, left: int | None) -> None:
        self.open.discard(name)
        self.starting.discard(name)
        self.outcome.left[name] = left
        self.gang.emit("node", node=name, state="lost" if left is None else "stopped", left=left)

    def _stop_others(self, reason: str) -> None:
        if self.stop_deadline is not None:
            return
        self.gang.emit("stopping", reason=reason)
        # A node needs the grace, a second for strays, and the way there and back.
        self.stop_deadline = time.monotonic() + self.plan.grace_s + 5
        for name in self.open:
            self.gang.sessions[name].send({"op": "stop"})

    def interrupt(self, number: int, *, hard: bool) -> None:
        """Somebody wants the launcher to stop; the second time without waiting for the workers."""
        if self.outcome.stopped_by is None:
            self.outcome.stopped_by = number
            self._stop_others(f"signal {number}")
        if hard and self.stop_deadline is not None:
            self.stop_deadline = min(self.stop_deadline, time.monotonic() + 3)
            for name in self.open:
                self.gang.sessions[name].send({"op": "stop", "now": True})

    def look_at_the_clock(self) -> None:
        """What did not happen in time: a start, a sign of life, a stop."""
        now = time.monotonic()
        for name in sorted(self.open):
            session = self.gang.sessions[name]
            if name in self.away:
                self._look_after(name, now)
            elif now - max(session.heard, self.begun) > self.link_timeout_s:
                session.close()
                self._lose(name, f"nothing was heard of it for {self.link_timeout_s:g} s")
            elif name in self.starting and now - self.begun > START_LIMIT_S:
                session.close()
                self._lose(name, f"it did not start the job within {START_LIMIT_S:g} s")
            elif self.stop_deadline is not None and now > self.stop_deadline:
                session.close()
                self._lose(name, "it did not stop in time")

    def _look_after(self, name: str, now: float) -> None:
        away = self.away[name]
        if self.stop_deadline is not None and now > self.stop_deadline:
            self._drop(name, left=None)
        elif now >= away.next and self.gang.reattach is not None:
            away.next = float("inf")  # until this try has failed
            self.gang.reattach(name)


def _as_ours(error: BaseException) -> DtctlError:
    if isinstance(error, DtctlError):
        return error
    bug = DtctlError(f"{type(error).__name__}: {error}", hint="this is a bug in dtctl; please report it")
    bug.__cause__ = error
    return bug
