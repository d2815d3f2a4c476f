"""Lost workers and nodes of an attempt: replaced while the others stay, called again, or its failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dtctl import names
from dtctl.launch.control.attempt_nodes import AttemptNodes
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.gang import PING_S
from dtctl.launch.control.session import NodeMessage
from dtctl.launch.records.events import NodeChanged, Note
from dtctl.supervisor.messages.attempt import LiveReport, StopAttempt, WorkerExit

if TYPE_CHECKING:
    from dtctl.launch.control.healing import Healing
    from dtctl.launch.control.node_pool import NodePool


class Losses:
    """Consequences of the loss of a worker or a node."""

    def __init__(self, nodes: AttemptNodes, *, healing: Healing | None, pool: NodePool | None) -> None:
        """Nothing is lost yet; with `healing` lost workers are replaced."""
        self.nodes = nodes
        self.healing = healing
        self.pool = pool
        nodes.give_up_replacing = self._give_up_replacing

    def _give_up_replacing(self) -> set[str]:
        if self.healing is None:
            return set()
        absent = self.healing.absent
        self.healing.give_up()
        return absent

    def take_call(self, pool: NodePool, message: NodeMessage) -> None:
        """Act on a message of a node that was called because a place is vacant."""
        substitute = pool.take(message)
        if substitute is None:
            return
        if not self.nodes.keeps_nodes:
            self.heal(lambda healing: healing.put(substitute))
        else:
            self.nodes.gang.sessions[substitute.lost] = substitute.session
            self.nodes.gang.emit(NodeChanged(node=substitute.lost, state="running"))
            if self.nodes.stop_deadline is not None:
                substitute.session.send(StopAttempt(now=False))

    def is_replaced(self, name: str, worker: WorkerExit) -> bool:
        """Return whether another process takes the place of a worker that has ended; begins that."""
        healing = self.healing
        if healing is None or self.nodes.stop_deadline is not None:
            return False
        if healing.is_expected(worker.rank):
            return True
        killed = worker.signal is not None and not worker.asked and not worker.told
        if not killed or self.nodes.ended_workers or self.nodes.starting or worker.rank < 0:
            return False
        failure = failure_of_worker(name, worker)
        self.heal(lambda healing: healing.lose(failure), failure)
        return True

    def take_live_report(self, healing: Healing, report: LiveReport) -> None:
        """Act on what a worker reports of the replacement of others."""
        healed = healing.take(report)
        if healed is not None:
            self.nodes.hang_monitor.begin_again()
            self.nodes.gang.emit(healed)

    def _is_node_replaced(self, name: str, text: str) -> bool:
        """Return whether another node takes the place of a lost one, or the node itself again; begins that."""
        nodes = self.nodes
        is_running = nodes.all_started and not nodes.ended_workers and nodes.stop_deadline is None
        if self.healing is None or not is_running:
            return False
        failure = failure_of_node(name, text)
        silent_s = time.monotonic() - self.nodes.gang.sessions[name].last_heard
        silent_s = silent_s if silent_s > 2 * PING_S else 0.0  # else its link has ended, which is known at once
        self.nodes.joining.discard(name)
        self.nodes.gang.emit(NodeChanged(node=name, state="lost"))
        self.heal(lambda healing: healing.lose_node(failure, detect_s=silent_s), failure)
        return True

    def heal(self, action: Callable[[Healing], None], failure: Failure | None = None) -> None:
        """Take a healing a step further; given up, it is the failure that it began with."""
        if self.healing is None:
            return
        from dtctl.launch.control.spares import NotHealed  # few runs need it

        try:
            action(self.healing)
        except NotHealed as exc:
            self.end_healing(str(exc), failure)
            self.nodes.stop_others("a lost worker could not be replaced")

    def end_healing(self, reason: str, failure: Failure | None = None) -> None:
        """Give up the current healing: the attempt has failed with the failure that it began with."""
        if self.healing is None:
            return
        absent = self.healing.absent
        cause = self.healing.give_up() or failure
        if cause is None:
            return
        self.nodes.outcome.failures.append(cause)
        self.nodes.gang.emit(Note(node=cause.node, text=f"not healed, all workers are restarted: {reason}"))
        lost = {each.node for each in (cause, failure) if each is not None and each.rank is None}
        self.nodes.lose(absent | lost)

    def end_healing_without(self, name: str, rank: int) -> None:
        """Give up the current healing: a worker that has ended successfully does not join the others again."""
        if self.healing is not None and self.healing.is_on and self.nodes.stop_deadline is None:
            self.end_healing(f"rank {rank} on {name} has ended, meanwhile")
            self.nodes.stop_others("a lost worker could not be replaced")

    def replace_hung(self, hung: Failure, *, detect_s: float) -> None:
        """Replace a worker that is there and makes no progress."""
        self.heal(lambda healing: healing.lose(hung, is_running=True, detect_s=detect_s), hung)

    def lose(self, name: str, text: str) -> None:
        """Act on the loss of a node: it is called again, replaced, or the attempt fails."""
        if self.pool is not None and self.nodes.keeps_nodes:
            self.nodes.gang.emit(NodeChanged(node=name, state="away"))
            self.pool.call_kept(name)
            return
        if not self.nodes.is_explained() and self._is_node_replaced(name, text):
            return
        self._lose_for_good(name, text)

    def _lose_for_good(self, name: str, text: str) -> None:
        self.nodes.outcome.lost_nodes.append(name)
        if self.nodes.is_explained():
            self.nodes.end_for_absence()
            self.nodes.give_up(name, state="stopped")
            return
        # A supervisor that is ended, or loses its link, stops its workers, and these stop all others. Reports of the
        # others may arrive before the loss, which is the cause.
        stopping = [failure.exit_code == names.REQUEUE_EXIT for failure in self.nodes.outcome.failures]
        if self.nodes.stop_deadline is None or (stopping and all(stopping)):
            self.fail(name, text, exit_code=None)
        self.nodes.give_up(name)

    def fail(self, name: str, text: str, *, exit_code: int | None) -> None:
        """End the attempt because of a node."""
        self.end_healing(f"{name}: {text}")
        self.nodes.outcome.failures.append(failure_of_node(name, text, exit_code=exit_code))
        self.nodes.stop_others(f"{name}: {text}")

    @property
    def vacant(self) -> set[str]:
        """Return the lost nodes that are called again, or that other nodes are to replace."""
        return set() if self.pool is None else self.pool.vacant

    def check_kept(self, pool: NodePool, now: float) -> None:
        """Call nodes again that continue by themselves, and give up those that stay away."""
        for name, error in pool.check().items():
            pool.abandon(name)
            self._lose_for_good(name, str(error))
        if self.nodes.stop_deadline is not None and now > self.nodes.stop_deadline:
            for name in pool.vacant:
                pool.abandon(name)
                self.nodes.give_up(name)


def failure_of_node(name: str, text: str, *, exit_code: int | None = None) -> Failure:
    """Return the failure that the loss of a node is."""
    return Failure(node=name, rank=None, exit_code=exit_code, signal=None, time=time.time(), summary=text)


def failure_of_worker(name: str, worker: WorkerExit) -> Failure:
    """Return the failure that the end of a worker is."""
    return Failure(
        node=name,
        rank=worker.rank if worker.rank >= 0 else None,
        exit_code=worker.code,
        signal=worker.signal,
        time=time.time(),
        node_reason=worker.why,
        asked_to_stop=worker.asked,
    )
