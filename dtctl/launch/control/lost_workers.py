"""Reaction to lost workers and nodes of an attempt: a replacement, another call, or the end of the attempt."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dtctl import names
from dtctl.launch.control.attempt_nodes import AttemptNodes
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.node_sessions import PING_S
from dtctl.launch.control.session import NodeMessage
from dtctl.launch.records.events import NodeChanged, Note
from dtctl.supervisor.messages.attempt import LiveReport, StopAttempt, WorkerExit

if TYPE_CHECKING:
    from dtctl.launch.control.node_pool import NodePool
    from dtctl.launch.control.worker_replacement import WorkerReplacement


class LostWorkerHandler:
    """Decision about each loss of a worker or a node."""

    def __init__(self, nodes: AttemptNodes, *, healing: WorkerReplacement | None, pool: NodePool | None) -> None:
        """Prepare to handle losses; with `healing`, lost workers are replaced."""
        self.nodes = nodes
        self.healing = healing
        self.pool = pool
        nodes.give_up_replacing = self._give_up_replacing

    def _give_up_replacing(self) -> set[str]:
        if self.healing is None:
            return set()
        absent = self.healing.unreplaced_nodes
        self.healing.abandon_replacement()
        return absent

    def handle_pool_message(self, pool: NodePool, message: NodeMessage) -> None:
        """Act on a message of a node that was called because a place is vacant."""
        substitute = pool.handle_called_node_message(message)
        if substitute is None:
            return
        if not self.nodes.keeps_nodes:
            self.run_replacement_step(lambda healing: healing.assign_substitute(substitute))
        else:
            self.nodes.gang.sessions[substitute.lost] = substitute.session
            self.nodes.gang.emit(NodeChanged(node=substitute.lost, state="running"))
            if self.nodes.stop_deadline is not None:
                substitute.session.send(StopAttempt(now=False))

    def replace_ended_worker(self, name: str, worker: WorkerExit) -> bool:
        """Begin to replace a worker that has ended, if possible; return whether another process takes its place."""
        healing = self.healing
        if healing is None or self.nodes.stop_deadline is not None:
            return False
        if healing.is_expected_exit(worker.rank):
            return True
        killed = worker.signal is not None and not worker.asked and not worker.told
        if not killed or self.nodes.ended_workers or self.nodes.starting or worker.rank < 0:
            return False
        failure = build_worker_failure(name, worker)
        self.run_replacement_step(lambda healing: healing.replace_failed_worker(failure), failure)
        return True

    def handle_live_report(self, healing: WorkerReplacement, report: LiveReport) -> None:
        """Act on a worker's report about the replacement of other workers."""
        healed = healing.handle_worker_report(report)
        if healed is not None:
            self.nodes.hang_monitor.reset_worker_progress()
            self.nodes.gang.emit(healed)

    def _is_node_replaced(self, name: str, text: str) -> bool:
        """Begin to replace a lost node by another one or itself, if possible; return whether this has begun."""
        nodes = self.nodes
        is_running = nodes.all_started and not nodes.ended_workers and nodes.stop_deadline is None
        if self.healing is None or not is_running:
            return False
        failure = build_node_failure(name, text)
        silent_s = time.monotonic() - self.nodes.gang.sessions[name].last_heard
        # After a shorter silence, the link has closed, which is detected at once.
        silent_s = silent_s if silent_s > 2 * PING_S else 0.0
        self.nodes.joining.discard(name)
        self.nodes.gang.emit(NodeChanged(node=name, state="lost"))
        self.run_replacement_step(lambda healing: healing.replace_lost_node(failure, detect_s=silent_s), failure)
        return True

    def run_replacement_step(self, action: Callable[[WorkerReplacement], None], failure: Failure | None = None) -> None:
        """Run one step of a replacement; if it cannot succeed, fail with the failure that it began with."""
        if self.healing is None:
            return
        from dtctl.launch.control.spare_pool import WorkerNotReplaced  # Few runs need this module.

        try:
            action(self.healing)
        except WorkerNotReplaced as exc:
            self.abort_replacement(str(exc), failure)
            self.nodes.stop_others("a lost worker could not be replaced")

    def abort_replacement(self, reason: str, failure: Failure | None = None) -> None:
        """Give up the current replacement: the attempt has failed with the failure that the replacement began with."""
        if self.healing is None:
            return
        absent = self.healing.unreplaced_nodes
        cause = self.healing.abandon_replacement() or failure
        if cause is None:
            return
        self.nodes.outcome.failures.append(cause)
        self.nodes.gang.emit(Note(node=cause.node, text=f"not healed, all workers are restarted: {reason}"))
        lost = {each.node for each in (cause, failure) if each is not None and each.rank is None}
        self.nodes.mark_nodes_lost(absent | lost)

    def abort_replacement_without(self, name: str, rank: int) -> None:
        """Give up the current replacement: a worker that has ended successfully cannot join the others again."""
        if self.healing is not None and self.healing.is_replacing and self.nodes.stop_deadline is None:
            self.abort_replacement(f"rank {rank} on {name} has ended, meanwhile")
            self.nodes.stop_others("a lost worker could not be replaced")

    def replace_hung(self, hung: Failure, *, detect_s: float) -> None:
        """Replace a worker whose process runs without progress."""
        self.run_replacement_step(
            lambda healing: healing.replace_failed_worker(hung, is_running=True, detect_s=detect_s), hung
        )

    def handle_node_loss(self, name: str, text: str) -> None:
        """Call a lost node again, replace it, or let the attempt fail."""
        if self.pool is not None and self.nodes.keeps_nodes:
            self.nodes.gang.emit(NodeChanged(node=name, state="away"))
            self.pool.reconnect_detached_node(name)
            return
        if not self.nodes.is_end_due_to_pause() and self._is_node_replaced(name, text):
            return
        self._lose_for_good(name, text)

    def _lose_for_good(self, name: str, text: str) -> None:
        self.nodes.outcome.lost_nodes.append(name)
        if self.nodes.is_end_due_to_pause():
            self.nodes.end_after_pause()
            self.nodes.give_up_node(name, state="stopped")
            return
        # A supervisor that is ended or loses its link stops its workers, and these stop all others. Reports of the
        # others may arrive before this loss, although it is their cause.
        stopping = [failure.exit_code == names.REQUEUE_EXIT for failure in self.nodes.outcome.failures]
        if self.nodes.stop_deadline is None or (stopping and all(stopping)):
            self.fail(name, text, exit_code=None)
        self.nodes.give_up_node(name)

    def fail(self, name: str, text: str, *, exit_code: int | None) -> None:
        """End the attempt because of a node."""
        self.abort_replacement(f"{name}: {text}")
        self.nodes.outcome.failures.append(build_node_failure(name, text, exit_code=exit_code))
        self.nodes.stop_others(f"{name}: {text}")

    @property
    def vacant(self) -> set[str]:
        """Return the lost nodes that are being called again or replaced."""
        return set() if self.pool is None else self.pool.vacant

    def check_detached_nodes(self, pool: NodePool, now: float) -> None:
        """Call nodes again that continue without the launcher, and give up those that do not answer in time."""
        for name, error in pool.check().items():
            pool.cancel_search(name)
            self._lose_for_good(name, str(error))
        if self.nodes.stop_deadline is not None and now > self.nodes.stop_deadline:
            for name in pool.vacant:
                pool.cancel_search(name)
                self.nodes.give_up_node(name)


def build_node_failure(name: str, text: str, *, exit_code: int | None = None) -> Failure:
    """Return the failure for the loss of a node."""
    return Failure(node=name, rank=None, exit_code=exit_code, signal=None, time=time.time(), summary=text)


def build_worker_failure(name: str, worker: WorkerExit) -> Failure:
    """Return the failure for the end of a worker."""
    return Failure(
        node=name,
        rank=worker.rank if worker.rank >= 0 else None,
        exit_code=worker.code,
        signal=worker.signal,
        time=time.time(),
        node_reason=worker.why,
        asked_to_stop=worker.asked,
    )
