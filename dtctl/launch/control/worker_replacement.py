"""Replacement of lost workers while the others stay: the launcher's decisions (docs/recovery.md).

Replacements, called healings, follow one another. Each replacement has one or more epochs: another loss before its end
begins a new epoch. If a loss cannot be healed, the attempt has failed, and attempt.py handles the failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dtctl.launch.control import failure as failures
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.node_pool import LIVE, NodePool, ReplacementNode
from dtctl.launch.control.node_sessions import NodeSessions
from dtctl.launch.control.spare_pool import WorkerNotReplaced
from dtctl.launch.records.events import ReplacedWorker, SurvivingWorker, WorkersReplaced
from dtctl.launch.records.ledger import Ledger
from dtctl.supervisor.messages.attempt import Heal, Join, LiveReport

IN_PLACE = 3
"""Most healings in a row without a step in between; after these, the cause would end the worker each time."""


@dataclass(slots=True, kw_only=True)
class _OngoingReplacement:
    """The current healing."""

    cause: Failure
    began_s: float
    detect_s: float
    """Seconds from the loss until it was detected."""
    lost: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Lost ranks, each with its node and a description of its loss."""
    ready: set[int] = field(default_factory=set)
    joined: dict[int, LiveReport] = field(default_factory=dict)
    asked_s: float = 0.0
    """Time when the newest loss was reported to the survivors."""
    meeting: tuple[str, int] | None = None
    """Address and port of the store at which the workers meet."""
    called_s: float | None = None
    """Time when the workers got the request to join, on the monotonic clock; None: they did not."""


@dataclass(frozen=True, slots=True)
class AwaitedWorker:
    """Worker that holds up the replacement of another one."""

    rank: int
    asked_s: float
    """Seconds since the request."""
    is_joining: bool
    """True if it was requested to join the new group, in which workers wait for each other; else to leave its step."""


class WorkerReplacement:
    """The healings of one attempt."""

    def __init__(
        self,
        gang: NodeSessions,
        node_of_rank: Mapping[int, str],
        *,
        limit_s: float,
        ledger: Ledger,
        address: Callable[[str], str],
        pool: NodePool | None = None,
        place: Callable[[ReplacementNode, int], None] | None = None,
    ) -> None:
        """Prepare to replace workers that are lost later.

        Args:
            gang: sessions with the nodes.
            node_of_rank: workers of the attempt, rank -> node.
            limit_s: `job.heal_s`.
            ledger: record of the run's time.
            address: returns the numeric address of a node for the others.
            pool: finds nodes that replace lost ones; None: a lost node is not replaced.
            place: starts the workers of an epoch on a replacement node; raises WorkerNotReplaced if the node
                cannot run them.
        """
        self._gang, self._nodes, self._limit_s = gang, dict(node_of_rank), limit_s
        self._ledger, self._address = ledger, address
        self._pool, self._place = pool, place
        self._epoch = 0
        self._current: _OngoingReplacement | None = None
        self._cut: tuple[Failure, float] | None = None
        """Failure and time of a worker that lost its connections to others, while no lost worker is known."""
        self._dying: set[int] = set()
        """Ranks whose old processes are being ended; their exits are expected."""
        self.newest_step = -1
        """Step after which workers were last replaced; -1: no worker was replaced."""
        self._in_place = 0

    @property
    def is_replacing(self) -> bool:
        """Return whether workers are being replaced."""
        return self._current is not None

    @property
    def unreplaced_nodes(self) -> set[str]:
        """Return the lost nodes that have not been replaced yet."""
        return set() if self._pool is None else self._pool.vacant

    def is_expected_exit(self, rank: int) -> bool:
        """Return whether a worker's process ended because of its replacement; called once for each such end."""
        if rank not in self._dying:
            return False
        self._dying.discard(rank)
        return True

    def replace_failed_worker(self, failure: Failure, *, is_running: bool = False, detect_s: float = 0.0) -> None:
        """Replace the worker that has failed.

        Args:
            failure: failure of a rank.
            is_running: whether the worker's process still runs; it is ended first.
            detect_s: seconds from the loss of the worker until it was detected.

        Raises:
            WorkerNotReplaced: no other worker has the same state, a node cannot be reached, or workers were replaced
                too often without a step in between.
        """
        rank = failure.rank
        assert rank is not None  # noqa: S101  # for the type checker
        current = self._start_healing(failure, detect_s)
        current.lost[rank] = (self._nodes[rank], failures.describe_failure(failure))
        if is_running:
            self._dying.add(rank)
        self._begin_epoch(current, [rank])

    def replace_lost_node(self, failure: Failure, *, detect_s: float) -> None:
        """Replace a node and its workers.

        Args:
            failure: failure of the node.
            detect_s: seconds from the loss of the node until it was detected.

        Raises:
            WorkerNotReplaced: as for `replace_failed_worker`, or this run cannot replace nodes.
        """
        name = failure.node
        ranks = [rank for rank, node in self._nodes.items() if node == name]
        if self._pool is None:
            raise WorkerNotReplaced(
                f"{name} {failures.describe_failure(failure)}, and with --detach no other node takes its place"
            )
        current = self._start_healing(failure, detect_s)
        for rank in ranks:
            current.lost[rank] = (name, f"was lost with its node: {failure.summary}")
        self._dying.difference_update(ranks)
        substitute = self._pool.search(name, LIVE)
        self._begin_epoch(current, ranks)
        if substitute is not None:
            self.assign_substitute(substitute)

    def _start_healing(self, cause: Failure, detect_s: float) -> _OngoingReplacement:
        if self._current is None:
            if self._in_place >= IN_PLACE:
                raise WorkerNotReplaced(
                    f"step {self.newest_step + 1} was not completed after {IN_PLACE + 1} replacements"
                )
            self._cut = None
            self._current = _OngoingReplacement(cause=cause, began_s=time.monotonic(), detect_s=detect_s)
            self._ledger.record_worker_loss(detect_s)
        return self._current

    def _begin_epoch(self, current: _OngoingReplacement, lost: Sequence[int]) -> None:
        current.ready, current.joined, current.meeting, current.called_s = set(), {}, None, None
        survivors = sorted(self._nodes.keys() - current.lost.keys())
        if not survivors:
            raise WorkerNotReplaced("no worker is left that has the state")
        self._epoch += 1
        current.asked_s = time.monotonic()
        self._send_heal_message(Heal(epoch=self._epoch, lost=list(lost), host=survivors[0]))

    def _send_heal_message(self, message: Heal | Join) -> None:
        for name in dict.fromkeys(self._nodes.values()):
            self._gang.sessions[name].send(message)  # The link's reader reports a lost link.

    def list_awaited_workers(self) -> list[AwaitedWorker]:
        """Return the workers that have not reacted yet to the newest request, by rank."""
        current = self._current
        if current is None:
            return []
        if current.called_s is None:
            ranks = self._nodes.keys() - current.lost.keys() - current.ready
            since_s = current.asked_s
        else:
            ranks = self._nodes.keys() - current.joined.keys()
            since_s = current.called_s
        asked_s, is_joining = time.monotonic() - since_s, current.called_s is not None
        return [AwaitedWorker(rank, asked_s, is_joining=is_joining) for rank in sorted(ranks)]

    def assign_substitute(self, substitute: ReplacementNode) -> None:
        """Replace a lost node by another one.

        Raises:
            WorkerNotReplaced: the node cannot run the same workers.
        """
        assert self._place is not None  # noqa: S101  # for the type checker
        name = substitute.session.name
        self._nodes = {rank: name if node == substitute.lost else node for rank, node in self._nodes.items()}
        self._place(substitute, self._epoch)

    def handle_worker_report(self, report: LiveReport) -> WorkersReplaced | None:
        """Handle a worker's report; return the event if it completes the new process group.

        Raises:
            WorkerNotReplaced: a worker cannot be healed.
        """
        current = self._current
        if report.state == "cut" and current is None and report.epoch == self._epoch:
            summary = "its connections to other workers were lost, but no lost worker was reported"
            cut = Failure(
                node=self._nodes[report.rank], rank=report.rank, exit_code=None, signal=None, time=time.time(),
                summary=summary,
            )  # fmt: skip
            self._cut = self._cut or (cut, time.monotonic())
        if current is None or report.epoch != self._epoch:
            return None
        if report.state == "unable":
            raise WorkerNotReplaced(f"rank {report.rank} on {self._nodes[report.rank]}: {report.why}")
        if report.state == "failed":
            self._begin_epoch(current, [])
        elif report.state == "hosting":
            current.meeting = (self._address(self._nodes[report.rank]), report.port)
        elif report.state == "ready":
            current.ready.add(report.rank)
        elif report.state == "joined":
            current.joined[report.rank] = report
        if current.meeting is not None and current.called_s is None and current.ready >= self._nodes.keys():
            current.called_s = time.monotonic()
            address, port = current.meeting
            self._send_heal_message(Join(epoch=self._epoch, address=address, port=port))
        return self._finish_healing(current) if current.joined.keys() >= self._nodes.keys() else None

    def _finish_healing(self, current: _OngoingReplacement) -> WorkersReplaced:
        self._current = self._cut = None
        self._dying.clear()
        self._ledger.enter("useful")
        step = max(report.step for report in current.joined.values())
        self._in_place = self._in_place + 1 if step == self.newest_step else 0
        self.newest_step = step
        stayed = [report for rank, report in sorted(current.joined.items()) if rank not in current.lost]
        return WorkersReplaced(
            step=step,
            replaced=tuple(
                ReplacedWorker(rank=rank, node=node, by=self._nodes[rank], reason=reason)
                for rank, (node, reason) in sorted(current.lost.items())
            ),
            survivors=tuple(
                SurvivingWorker(rank=report.rank, node=self._nodes[report.rank], pid=report.pid) for report in stayed
            ),
            repeated_steps=int(any(report.repeats for report in stayed)),
            detect_s=round(current.detect_s, 3),
            heal_s=round(time.monotonic() - current.began_s, 3),
        )

    def check(self, patience_s: float) -> None:
        """Check the time limits.

        Args:
            patience_s: seconds within which the loss of a node is detected. If connections broke longer ago and no loss
                is known, all workers connect again.

        Raises:
            WorkerNotReplaced: a limit is exceeded.
        """
        current = self._current
        if self._pool is not None:
            self._pool.connect_standbys()
        if current is None:
            if self._cut is not None and time.monotonic() - self._cut[1] > patience_s:
                self._begin_epoch(self._start_healing(self._cut[0], time.monotonic() - self._cut[1]), [])
            return
        for lost, error in self._pool.check().items() if self._pool is not None else ():
            raise WorkerNotReplaced(f"no node can replace {lost}: {error}")
        if time.monotonic() - current.began_s > self._limit_s:
            waiting = sorted(self._nodes.keys() - (current.ready if current.called_s is None else current.joined))
            ranks = ", ".join(f"{rank} on {self._nodes[rank]}" for rank in waiting[:4])
            raise WorkerNotReplaced(f"after {self._limit_s:g} s (job.heal_s) these ranks are not ready: {ranks}")

    def abandon_replacement(self) -> Failure | None:
        """End the current healing, and all searches for nodes; return the failure that the healing began with."""
        cause = None if self._current is None else self._current.cause
        self._current = None
        if self._pool is not None:
            self._pool.end()
        return cause
