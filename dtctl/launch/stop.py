"""Stop of a run from another terminal: by its launcher if that is alive, on the nodes themselves otherwise."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtctl.errors import DtctlError, LaunchError
from dtctl.launch.orphaned_runs import OrphanedRunNode, sweep_nodes
from dtctl.launch.records.events import AttemptStarting, NodeChanged, RunEnded
from dtctl.launch.records.record import RunRecord
from dtctl.launch.records.run_writer import RunWriter
from dtctl.launch.records.state import is_launcher_alive, read_run_state
from dtctl.launch.remote_runs import GRACE_S
from dtctl.transport.base import Target, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """Result of stopping a run."""

    left: Mapping[str, int | DtctlError]
    """Number of processes left on each node, or the error if the node could not be queried."""


def request_launcher_stop(record: RunRecord, *, wait_s: float) -> bool:
    """Send the run's launcher a request to stop, and wait until the run is over; return False without a launcher.

    Raises:
        LaunchError: the run did not end in time.
    """
    info = record.info()
    # A launcher holds its run's lock; a record that was copied here, or made up, may name any process.
    if read_run_state(record).over or not is_launcher_alive(info) or not record.has_launcher():
        return False
    os.kill(info.pid, signal.SIGTERM)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if not record.has_launcher():
            # The launcher records the end after it has released the lock. One that was killed records none.
            is_alive, is_done = is_launcher_alive(info), read_run_state(record).done is not None
            if is_done or not is_alive:
                return is_done
        time.sleep(0.05)
    raise LaunchError(
        f"the launcher of run {record.run} did not stop it within {wait_s:g} s",
        where=f"process {info.pid}",
        hint="run `dtctl stop` again to stop it without a grace period",
    )


def read_clean_nodes(record: RunRecord) -> set[str]:
    """Return the nodes that have counted, at the end of the newest attempt, that no process of the run is left."""
    clean: set[str] = set()
    for event in record.events():
        if isinstance(event, AttemptStarting):
            clean.clear()
        elif isinstance(event, NodeChanged):
            clean.discard(event.node)
            if event.state == "stopped" and event.left == 0:
                clean.add(event.node)
    return clean


def stop_on_nodes(
    record: RunRecord, targets: Mapping[str, Target], make_transport: Callable[[], Transport], *, by_launcher: bool
) -> StopResult:
    """End the run on its nodes, also while a launcher still watches it.

    Args:
        record: the run.
        targets: the run's nodes.
        make_transport: makes the transport to these nodes, which may begin to call all of them.
        by_launcher: whether the run's launcher has just ended it. Then only the nodes are queried that have not told
            the launcher that nothing is left; else all of them, and the end of the run is recorded.

    Raises:
        LaunchError: the run has no plan, so it was never started, or the plan is incomplete.
    """
    plan = record.whole_plan()
    nodes = [
        OrphanedRunNode(target=targets[node["name"]], python=node["python"], workdir=node["workdir"])
        for node in plan["nodes"]
        if node["name"] in targets
    ]
    clean = read_clean_nodes(record) if by_launcher else set()
    grace_s = float(plan.get("grace_s", GRACE_S))
    unknown = [node for node in nodes if node.target.name not in clean]
    left_behind: dict[str, int | DtctlError] = {node.target.name: 0 for node in nodes}
    if unknown:
        left_behind |= sweep_nodes(
            unknown, make_transport(), run=record.run, token=record.info().token, grace_s=grace_s
        )
    if not by_launcher and not read_run_state(record).done:
        counts = [answer for answer in left_behind.values() if isinstance(answer, int)]
        left = sum(counts) if len(counts) == len(left_behind) else None
        RunWriter(record.folder).append_event(
            RunEnded(
                run=record.run, status="stopped", exit_code=128 + signal.SIGTERM, attempts=int(plan["attempt"]) + 1,
                left_behind=left,
            )
        )  # fmt: skip
    return StopResult(left=left_behind)
