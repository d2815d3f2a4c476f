"""The states of an attempt, and their time limits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from dtctl.launch.control.attempt_nodes import STOP_MARGIN_S, AttemptNodes
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.lost_workers import LostWorkerHandler
from dtctl.launch.control.node_sessions import PING_S
from dtctl.launch.control.session import NodeSession
from dtctl.launch.records.events import HangDetected
from dtctl.supervisor.frames import AGENT
from dtctl.supervisor.messages.attempt import RequestStacks

if TYPE_CHECKING:
    from dtctl.launch.control.worker_replacement import AwaitedWorker

START_LIMIT_S: Final = 30.0
"""Seconds that a node may take from the start message to its answer."""
CLOSE_SILENCE_S: Final = 120.0
"""Seconds without output after which nodes whose workers have all ended are stopped."""


class AttemptState(Enum):
    """State of an attempt."""

    STARTING = "starting"
    RUNNING = "running"
    HEALING = "healing"
    ENDING = "ending"
    CLOSING = "closing"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStateRule:
    """Exits of a state; in each state, a node that is silent for `cluster.link_timeout_s` is lost."""

    ended_by: str
    limit: str
    """Name or formula of the longest time in the state."""
    check: str
    """Method of `AttemptDeadlines` that checks this limit."""
    next: tuple[AttemptState, ...]
    open_ended: str = ""
    """Reason why only the program and its user end the state; empty: the state has a time limit."""


STATES: Final[Mapping[AttemptState, AttemptStateRule]] = {
    AttemptState.STARTING: AttemptStateRule(
        ended_by="the answer of the last node to its start message",
        limit=f"{START_LIMIT_S:g} s",
        check="check_start",
        next=(AttemptState.RUNNING, AttemptState.STOPPING, AttemptState.OVER),
    ),
    AttemptState.RUNNING: AttemptStateRule(
        ended_by="the end of a worker, or its loss",
        limit="job.hang_s without a step, if the job reports its steps; job.time_s",
        check="check_progress",
        next=(AttemptState.HEALING, AttemptState.ENDING, AttemptState.CLOSING, AttemptState.STOPPING),
        open_ended="the program reports no steps, and the spec has no job.time_s",
    ),
    AttemptState.HEALING: AttemptStateRule(
        ended_by="the message that all workers have joined, or that one has ended: it cannot join any more",
        limit="job.heal_s",
        check="check_healing",
        next=(AttemptState.RUNNING, AttemptState.STOPPING),
    ),
    AttemptState.ENDING: AttemptStateRule(
        ended_by="the end of the last worker",
        limit="job.hang_s without a step, if the job reports its steps; job.time_s",
        check="check_progress",
        next=(AttemptState.CLOSING, AttemptState.STOPPING),
        open_ended="the program reports no steps, and the spec has no job.time_s",
    ),
    AttemptState.CLOSING: AttemptStateRule(
        ended_by="the report of the last node",
        limit=f"{CLOSE_SILENCE_S:g} s without output",
        check="check_close",
        next=(AttemptState.OVER, AttemptState.STOPPING),
    ),
    AttemptState.STOPPING: AttemptStateRule(
        ended_by="the report of the last node",
        limit=f"job.grace_s + {STOP_MARGIN_S:g} s",
        check="check_stop",
        next=(AttemptState.OVER,),
    ),
}
"""All states but the last one, which has no end; `AttemptDeadlines` checks only the limits of this table."""


class AttemptDeadlines:
    """Time limits of an attempt."""

    def __init__(self, nodes: AttemptNodes, losses: LostWorkerHandler, *, confirms_silence: bool) -> None:
        """Prepare to check the limits of all nodes.

        With `confirms_silence`, a silent node is lost only if it does not answer a new connection either, or has been
        silent for twice the limit: no other node would take its place.
        """
        self.nodes, self.losses = nodes, losses
        self.confirms_silence = confirms_silence

    @property
    def state(self) -> AttemptState:
        """Current state, as in the table above."""
        if not self.nodes.open:
            return AttemptState.OVER
        if self.nodes.stop_deadline is not None:
            return AttemptState.STOPPING
        if self.losses.healing is not None and self.losses.healing.is_replacing:
            return AttemptState.HEALING
        if self.nodes.starting:
            return AttemptState.STARTING
        if not self.nodes.ended_workers:
            return AttemptState.RUNNING
        agent = self.nodes.plan.kind == "torchrun"
        processes = {
            (node.name, AGENT if agent else node.first_rank + number)
            for node in self.nodes.plan.nodes
            for number in range(node.processes)
        }
        return AttemptState.CLOSING if processes <= self.nodes.ended_workers else AttemptState.ENDING

    def check(self) -> None:
        """Act on deadlines that have passed, for example of a start, a heartbeat or a stop."""
        self.nodes.gang.detect_launcher_pause()
        self.nodes.reset_node_deadlines()
        now = time.monotonic()
        if self.state is not AttemptState.OVER:
            getattr(self, STATES[self.state].check)(now)
        if self.losses.pool is not None and self.nodes.keeps_nodes:
            self.losses.check_detached_nodes(self.losses.pool, now)
        for name in sorted(self.nodes.open - self.losses.vacant):
            session = self.nodes.gang.sessions[name]
            self._check_silence(session, now - max(session.last_heard, self.nodes.begun_at))

    def check_start(self, now: float) -> None:
        """Give up nodes that do not start."""
        if now - self.nodes.begun_at > START_LIMIT_S:
            self._lose_late(self.nodes.starting, f"it did not start the job within {START_LIMIT_S:g} s")
        if self.nodes.stop_deadline is None:
            self.check_progress(now)

    def check_progress(self, now: float) -> None:
        """Restart or end a job whose workers make no progress."""
        can_heal = self.losses.healing is not None and not self.nodes.ended_workers
        if can_heal:
            self.losses.run_replacement_step(lambda healing: healing.check(self.nodes.link_timeout_s + 2 * PING_S))
        if self.losses.healing is not None and self.losses.healing.is_replacing:
            return
        if self.nodes.hang_monitor.hangs(now):
            self.nodes.gang.emit(HangDetected(silent_s=round(self.nodes.hang_monitor.silent_s or 0.0, 1)))
            nodes = {name for name in self.nodes.open if self.nodes.gang.sessions[name].send(RequestStacks())}
            self.nodes.hang_monitor.begin_collecting(nodes)
        failure = self.nodes.hang_monitor.verdict(now)
        if failure is not None and failure.rank is not None and can_heal:
            self.losses.replace_hung(failure, detect_s=self.nodes.hang_monitor.compute_silence_s(now))
        elif failure is not None:
            self.nodes.outcome.failures.append(failure)
            self.nodes.outcome.hung_s = self.nodes.hang_monitor.silent_s or 0.0
            self.nodes.stop_others(failure.summary, at_once=True)  # A hung worker ignores SIGTERM.

    def check_healing(self, _now: float) -> None:
        """Act on a replacement that takes too long, and on survivors that do not react and so hold up the others."""
        healing = self.losses.healing
        assert healing is not None  # noqa: S101  # for the type checker
        self.losses.run_replacement_step(lambda healing: healing.check(self.nodes.link_timeout_s + 2 * PING_S))
        for awaited in healing.list_awaited_workers():
            worker = self.nodes.hang_monitor.workers.get(awaited.rank)
            # Workers that join wait for each other, so the silence of one does not show which of them is at fault.
            if not awaited.is_joining or (worker is not None and worker.state == "T"):
                self._replace_if_stuck(awaited)

    def _replace_if_stuck(self, awaited: AwaitedWorker) -> None:
        healing, monitor = self.losses.healing, self.nodes.hang_monitor
        if healing is None or not monitor.is_stuck(
            awaited.rank, asked_s=awaited.asked_s, again=healing.newest_step >= 0
        ):
            return
        stuck = Failure(
            node=monitor.node_of_rank[awaited.rank],
            rank=awaited.rank,
            exit_code=None,
            signal=None,
            time=time.time(),
            summary=f"it has not reacted for {awaited.asked_s:.0f} s to the loss of another worker",
            hang=True,
        )
        self.losses.replace_hung(stuck, detect_s=0.0)

    def check_close(self, now: float) -> None:
        """Stop nodes that do not report the end of their workers."""
        if now - self.nodes.moved_at > CLOSE_SILENCE_S:
            self.nodes.stop_others("all workers have ended, and not all nodes report it")

    def check_stop(self, now: float) -> None:
        """Give up nodes that do not stop."""
        if self.nodes.stop_deadline is not None and now > self.nodes.stop_deadline:
            self._lose_late(self.nodes.open, "it did not stop in time")

    def _check_silence(self, session: NodeSession, silent_s: float) -> None:
        if silent_s <= self.nodes.link_timeout_s:
            session.second_call.discard_answer()
            return
        text = f"no message arrived from it for {self.nodes.link_timeout_s:g} s"
        if self.confirms_silence:
            answers = session.second_call.is_answered()
            if answers is not False and silent_s <= 2 * self.nodes.link_timeout_s:
                return
            if answers:
                twice_s = 2 * self.nodes.link_timeout_s
                text = f"no message arrived from it for {twice_s:g} s, though it takes new connections"
            else:
                text += ", and it does not answer a new connection"
        session.close()
        self.losses.handle_node_loss(session.name, text)

    def _lose_late(self, nodes: AbstractSet[str], text: str) -> None:
        for name in sorted((nodes & self.nodes.open) - self.losses.vacant):
            self.nodes.gang.sessions[name].close()
            self.losses.handle_node_loss(name, text)
