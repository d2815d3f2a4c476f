"""Stopping a run from another terminal: by its launcher if that is alive, on the nodes themselves otherwise."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from dtctl.errors import DtctlError, LaunchError
from dtctl.launch.elsewhere import GRACE_S
from dtctl.launch.records.events import RunEnded
from dtctl.launch.records.record import RunRecord
from dtctl.launch.records.run_writer import RunWriter
from dtctl.launch.records.state import alive, state_of
from dtctl.launch.sweep import SweepTarget, sweep
from dtctl.transport.base import Target, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Result of stopping a run."""

    left: Mapping[str, int | DtctlError]
    """Node -> processes left there, or why it could not be asked."""


def by_launcher(record: RunRecord, *, wait_s: float) -> bool:
    """Ask the run's launcher to stop it, and wait until it has; False when there is no launcher.

    Raises:
        LaunchError: it did not end in time.
    """
    info = record.info()
    # A launcher holds its run's lock; a record that was copied here, or made up, may name any process.
    if state_of(record).over or not alive(info) or not record.has_launcher():
        return False
    os.kill(info.pid, signal.SIGTERM)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if state_of(record).over:
            return True
        if not record.has_launcher():
            return False  # it could not
        time.sleep(0.05)
    raise LaunchError(
        f"the launcher of run {record.run} did not stop it within {wait_s:g} s",
        where=f"process {info.pid}",
        hint="run `dtctl stop` again to stop it without a grace period",
    )


def on_nodes(record: RunRecord, targets: Mapping[str, Target], transport: Transport, *, note: bool) -> Stopped:
    """End the run on its nodes, also while a launcher still watches it.

    Args:
        record: the run.
        targets: its nodes.
        transport: how to reach them.
        note: whether to record that the run is over, because its launcher has not.

    Raises:
        LaunchError: the run has no plan, so nothing of it was ever started, or the plan lacks something.
    """
    plan = record.whole_plan()
    nodes = [
        SweepTarget(target=targets[node["name"]], python=node["python"], workdir=node["workdir"])
        for node in plan["nodes"]
        if node["name"] in targets
    ]
    grace_s = float(plan.get("grace_s", GRACE_S))
    left_behind = sweep(nodes, transport, run=record.run, token=record.info().token, grace_s=grace_s)
    if note and not state_of(record).done:
        counts = [answer for answer in left_behind.values() if isinstance(answer, int)]
        left = sum(counts) if len(counts) == len(left_behind) else None
        RunWriter(record.folder).append_event(
            RunEnded(
                run=record.run, status="stopped", exit_code=128 + signal.SIGTERM, attempts=int(plan["attempt"]) + 1,
                left_behind=left,
            )
        )  # fmt: skip
    return Stopped(left=left_behind)
