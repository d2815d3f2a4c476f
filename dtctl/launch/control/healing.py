"""Lost workers of an attempt, replaced while the others stay: what the launcher decides (docs/recovery.md).

One healing after the other, each in one or more epochs: another loss on the way begins a new one. Whatever cannot be
healed is a failure of the attempt, and what follows from that is the business of attempt.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dtctl.launch.control import failure as failures
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.gang import Gang
from dtctl.launch.control.node_pool import LIVE, NodePool, Substitute
from dtctl.launch.control.spares import NotHealed
from dtctl.launch.records.events import Healed, Replacement, Survivor
from dtctl.launch.records.ledger import Ledger
from dtctl.supervisor.messages.attempt import Heal, Join, LiveReport

IN_PLACE = 3
"""Healings in a row without a step in between: after so many, whatever ends the worker will do so again."""


@dataclass(slots=True, kw_only=True)
class _Current:
    """The healing that is under way."""

    cause: Failure
    began_s: float
    detect_s: float
    """Seconds from the loss until it was noticed."""
    lost: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Ranks that were lost, each with its node and how."""
    ready: set[int] = field(default_factory=set)
    joined: dict[int, LiveReport] = field(default_factory=dict)
    asked_s: float = 0.0
    """Time when the newest loss was reported to the survivors."""
    meeting: tuple[str, int] | None = None
    """Address and port of the store."""
    is_called: bool = False
    """True if the workers have got the request to join."""


class Healing:
    """The healings of one attempt."""

    def __init__(
        self,
        gang: Gang,
        node_of_rank: Mapping[int, str],
        *,
        limit_s: float,
        ledger: Ledger,
        address: Callable[[str], str],
        pool: NodePool | None = None,
        place: Callable[[Substitute, int], None] | None = None,
    ) -> None:
        """Nothing is lost yet.

        Args:
            gang: the nodes.
            node_of_rank: workers of the attempt.
            limit_s: `job.heal_s`.
            ledger: of the run.
            address: numeric address of a node, for the others.
            pool: finds nodes for the places of lost ones. None: a lost node is not replaced.
            place: starts the workers of an epoch on a node that takes a place. Raises NotHealed if it does not fit.
        """
        self._gang, self._nodes, self._limit_s = gang, dict(node_of_rank), limit_s
        self._ledger, self._address = ledger, address
        self._pool, self._place = pool, place
        self._epoch = 0
        self._current: _Current | None = None
        self._cut: tuple[Failure, float] | None = None
        """A worker that has lost its connections to others, while no loss of a worker is known, and the time."""
        self._dying: set[int] = set()
        """Ranks whose old processes are being ended; their exits are expected."""
        self.newest_step = -1
        """Step after which workers were replaced last; -1: none were."""
        self._in_place = 0

    @property
    def is_on(self) -> bool:
        """Return whether workers are being replaced."""
        return self._current is not None

    @property
    def absent(self) -> set[str]:
        """Nodes that are lost and have not been replaced yet."""
        return set() if self._pool is None else self._pool.vacant

    def is_expected(self, rank: int) -> bool:
        """Return whether the end of a worker's process is a part of its replacement; asked once."""
        if rank not in self._dying:
            return False
        self._dying.discard(rank)
        return True

    def lose(self, failure: Failure, *, is_running: bool = False, detect_s: float = 0.0) -> None:
        """Replace the worker that has failed.

        Args:
            failure: of a rank.
            is_running: whether its process is still there; it is ended first.
            detect_s: for how long it had been lost before this was detected.

        Raises:
            NotHealed: no worker is left that has its state, a node cannot be reached, or the same step is healed for
                ever.
        """
        rank = failure.rank
        assert rank is not None  # noqa: S101  # for the type checker
        current = self._begin(failure, detect_s)
        current.lost[rank] = (self._nodes[rank], failures.describe(failure))
        if is_running:
            self._dying.add(rank)
        self._begin_epoch(current, [rank])

    def lose_node(self, failure: Failure, *, detect_s: float) -> None:
        """Replace a node, and with it its workers.

        Args:
            failure: of the node.
            detect_s: for how long it had been lost before this was detected.

        Raises:
            NotHealed: as for `lose`, or nodes cannot be replaced here.
        """
        name = failure.node
        ranks = [rank for rank, node in self._nodes.items() if node == name]
        if self._pool is None:
            raise NotHealed(f"{name} {failures.describe(failure)}, and with --detach no other node takes its place")
        current = self._begin(failure, detect_s)
        for rank in ranks:
            current.lost[rank] = (name, f"was lost with its node: {failure.summary}")
        self._dying.difference_update(ranks)
        substitute = self._pool.search(name, LIVE)
        self._begin_epoch(current, ranks)
        if substitute is not None:
            self.put(substitute)

    def _begin(self, cause: Failure, detect_s: float) -> _Current:
        if self._current is None:
            if self._in_place >= IN_PLACE:
                raise NotHealed(f"step {self.newest_step + 1} was not completed after {IN_PLACE + 1} replacements")
            self._cut = None
            self._current = _Current(cause=cause, began_s=time.monotonic(), detect_s=detect_s)
            self._ledger.lost(detect_s)
        return self._current

    def _begin_epoch(self, current: _Current, lost: Sequence[int]) -> None:
        current.ready, current.joined, current.meeting, current.is_called = set(), {}, None, False
        survivors = sorted(self._nodes.keys() - current.lost.keys())
        if not survivors:
            raise NotHealed("no worker is left that has the state")
        self._epoch += 1
        current.asked_s = time.monotonic()
        self._send(Heal(epoch=self._epoch, lost=list(lost), host=survivors[0]))

    def _send(self, message: Heal | Join) -> None:
        for name in dict.fromkeys(self._nodes.values()):
            self._gang.sessions[name].send(message)  # the reader of a link reports that it is gone

    def late(self) -> dict[int, float]:
        """Return the survivors that have not reported yet that they are ready: rank -> seconds since the request."""
        current = self._current
        if current is None:
            return {}
        asked_s = time.monotonic() - current.asked_s
        return dict.fromkeys(sorted(self._nodes.keys() - current.lost.keys() - current.ready), asked_s)

    def put(self, substitute: Substitute) -> None:
        """Let a node take the place of a lost one.

        Raises:
            NotHealed: it does not fit.
        """
        assert self._place is not None  # noqa: S101  # for the type checker
        name = substitute.session.name
        self._nodes = {rank: name if node == substitute.lost else node for rank, node in self._nodes.items()}
        self._place(substitute, self._epoch)

    def take(self, report: LiveReport) -> Healed | None:
        """Take in a worker's report; return the event if all workers are in the new group with it.

        Raises:
            NotHealed: a worker cannot be healed.
        """
        current = self._current
        if report.state == "cut" and current is None and report.epoch == self._epoch:
            summary = "its connections to other workers were lost, and nobody knows of a lost worker"
            cut = Failure(
                node=self._nodes[report.rank], rank=report.rank, exit_code=None, signal=None, time=time.time(),
                summary=summary,
            )  # fmt: skip
            self._cut = self._cut or (cut, time.monotonic())
        if current is None or report.epoch != self._epoch:
            return None
        if report.state == "unable":
            raise NotHealed(f"rank {report.rank} on {self._nodes[report.rank]}: {report.why}")
        if report.state == "failed":
            self._begin_epoch(current, [])
        elif report.state == "hosting":
            current.meeting = (self._address(self._nodes[report.rank]), report.port)
        elif report.state == "ready":
            current.ready.add(report.rank)
        elif report.state == "joined":
            current.joined[report.rank] = report
        if current.meeting is not None and not current.is_called and current.ready >= self._nodes.keys():
            current.is_called = True
            address, port = current.meeting
            self._send(Join(epoch=self._epoch, address=address, port=port))
        return self._finish(current) if current.joined.keys() >= self._nodes.keys() else None

    def _finish(self, current: _Current) -> Healed:
        self._current = self._cut = None
        self._dying.clear()
        self._ledger.enter("useful")
        step = max(report.step for report in current.joined.values())
        self._in_place = self._in_place + 1 if step == self.newest_step else 0
        self.newest_step = step
        stayed = [report for rank, report in sorted(current.joined.items()) if rank not in current.lost]
        return Healed(
            step=step,
            replaced=tuple(
                Replacement(rank=rank, node=node, by=self._nodes[rank], reason=reason)
                for rank, (node, reason) in sorted(current.lost.items())
            ),
            survivors=tuple(
                Survivor(rank=report.rank, node=self._nodes[report.rank], pid=report.pid) for report in stayed
            ),
            repeated_steps=int(any(report.repeats for report in stayed)),
            detect_s=round(current.detect_s, 3),
            heal_s=round(time.monotonic() - current.began_s, 3),
        )

    def check(self, patience_s: float) -> None:
        """Check the time limits.

        Args:
            patience_s: after which a node that is lost would be known to be. If connections broke longer ago than that,
                all workers make theirs again.

        Raises:
            NotHealed: a limit is exceeded.
        """
        current = self._current
        if self._pool is not None:
            self._pool.keep_standbys()
        if current is None:
            if self._cut is not None and time.monotonic() - self._cut[1] > patience_s:
                self._begin_epoch(self._begin(self._cut[0], time.monotonic() - self._cut[1]), [])
            return
        for lost, error in self._pool.check().items() if self._pool is not None else ():
            raise NotHealed(f"no node is there for the place of {lost}: {error}")
        if time.monotonic() - current.began_s > self._limit_s:
            waiting = sorted(self._nodes.keys() - (current.joined if current.is_called else current.ready))
            ranks = ", ".join(f"{rank} on {self._nodes[rank]}" for rank in waiting[:4])
            raise NotHealed(f"after {self._limit_s:g} s (job.heal_s) these ranks are not ready: {ranks}")

    def give_up(self) -> Failure | None:
        """Heal no more in this attempt; return the failure that the current healing began with."""
        cause = None if self._current is None else self._current.cause
        self._current = None
        if self._pool is not None:
            self._pool.end()
        return cause
