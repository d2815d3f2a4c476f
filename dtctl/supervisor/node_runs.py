"""Runs of a node, from its folders, for a control machine that did not launch them. Stdlib only, Python 3.8.

This module only reads files that the login user may read anyway.
"""

from __future__ import annotations

import os

from dtctl import folders
from dtctl.schema import InvalidMessage
from dtctl.supervisor import frames, output_log, processes
from dtctl.supervisor.messages.attempt import AttemptStopped
from dtctl.supervisor.messages.base import Message, index_message_types
from dtctl.supervisor.messages.runs import ListRuns, LogsRead, ReadLogs, RunOnNode, RunsOnNode
from dtctl.supervisor.messages.setup import RUNS
from dtctl.supervisor.records import EXIT_RECORD
from dtctl.supervisor.requests import NodeRequests, RequestFailed

RECORD_BYTES = 1 << 20
REQUEUE_EXIT = 75
"""Value of names.REQUEUE_EXIT, which code on nodes does not import."""


class RunRequests(NodeRequests):
    """Answers to a control machine that looks for runs."""

    KINDS = index_message_types(ListRuns, ReadLogs)
    IDLE_LIMIT_S = 600.0

    def answer(self, request: Message) -> None:
        """List the runs, or send the output of one."""
        if isinstance(request, ListRuns):
            self.link.send_json(RunsOnNode(runs=list_recorded_runs(self.workdir)))
        elif isinstance(request, ReadLogs):
            read_logs(self.link, self.workdir, request)


def list_recorded_runs(workdir: str) -> list[RunOnNode]:
    """Return the runs that have a record, the newest last."""
    top = os.path.join(workdir, "runs")
    names = [name for name in os.listdir(top) if folders.is_name(name)] if os.path.isdir(top) else []
    runs = [run for name in names for run in [_read_run_on_node(os.path.join(top, name))] if run is not None]
    return sorted(runs, key=lambda run: run.started)[-RUNS:]


def _read_run_on_node(run_dir: str) -> RunOnNode | None:
    try:
        record = frames.decode_message(folders.read_regular(os.path.join(run_dir, processes.RECORD), RECORD_BYTES))
        pid, attempt = int(record["pid"]), int(record["attempt"])
        is_running = processes.read_process_identity(pid) == record["identity"] != ""
        origin = record.get("origin", {})
        ended = None if is_running else _read_attempt_end(os.path.join(run_dir, "attempt-%d" % attempt))
        return RunOnNode(
            run=os.path.basename(run_dir),
            token=str(record["token"]),
            attempt=attempt,
            keep=bool(record["keep"]),
            is_running=is_running,
            started=float(origin.get("started", 0)),
            launched_from=str(origin.get("launched_from", "")),
            command=str(origin.get("command", "")),
            exit_code=None if ended is None else next((each.code for each in ended.exits if each.code), 0),
            is_stopped=ended is not None and _was_stopped(ended),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, frames.BrokenFrame):
        return None


def _read_attempt_end(attempt_dir: str) -> AttemptStopped | None:
    """Return the record of an ended attempt; None if there is none."""
    try:
        data = folders.read_regular(os.path.join(attempt_dir, EXIT_RECORD), RECORD_BYTES)
        return AttemptStopped.parse(frames.decode_message(data))
    except (OSError, frames.BrokenFrame, InvalidMessage):
        return None


def _was_stopped(ended: AttemptStopped) -> bool:
    """Return whether the run, by its record or by a worker's exit code, was stopped on request."""
    return ended.requested or any(each.code == REQUEUE_EXIT for each in ended.exits)


def read_logs(link: frames.FdLink, workdir: str, request: ReadLogs) -> None:
    """Send the output of the newest attempt after the requested offsets."""
    run_dir = os.path.join(workdir, "runs", request.run)
    run = _read_run_on_node(run_dir)  # The state is read before the logs, so that the last output is not missed.
    if run is None:
        raise RequestFailed("no-run", "%s is not the folder of a run" % run_dir)
    folder = os.path.join(run_dir, "attempt-%d" % run.attempt)
    offsets = request.offsets if request.attempt == run.attempt else {}
    output_log.send_stored(link, folder, offsets, {})
    link.send_json(
        LogsRead(
            attempt=run.attempt, is_running=run.is_running, exit_code=run.exit_code, is_stopped=run.is_stopped
        )
    )  # fmt: skip
