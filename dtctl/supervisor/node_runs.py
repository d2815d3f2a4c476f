"""Runs of a node, from its folders, for a control machine that did not launch them. Stdlib only, Python 3.8.

It only reads what the login user may read anyway.
"""

from __future__ import annotations

import os

from dtctl import folders
from dtctl.schema import InvalidMessage
from dtctl.supervisor import frames, output_log, processes
from dtctl.supervisor.messages.attempt import AttemptStopped
from dtctl.supervisor.messages.base import Message, by_op
from dtctl.supervisor.messages.runs import ListRuns, LogsRead, ReadLogs, RunOnNode, RunsOnNode
from dtctl.supervisor.messages.setup import RUNS
from dtctl.supervisor.requests import CannotDo, NodeRequests

RECORD_BYTES = 1 << 20


class RunRequests(NodeRequests):
    """Answers to a control machine that looks for runs."""

    KINDS = by_op(ListRuns, ReadLogs)
    IDLE_LIMIT_S = 600.0

    def answer(self, request: Message) -> None:
        """List the runs, or send the output of one."""
        if isinstance(request, ListRuns):
            self.link.send_json(RunsOnNode(runs=list_runs(self.workdir)))
        elif isinstance(request, ReadLogs):
            read_logs(self.link, self.workdir, request)


def list_runs(workdir: str) -> list[RunOnNode]:
    """Return the runs that have a record, the newest last."""
    top = os.path.join(workdir, "runs")
    names = [name for name in os.listdir(top) if folders.is_name(name)] if os.path.isdir(top) else []
    runs = [run for name in names for run in [_look(os.path.join(top, name))] if run is not None]
    return sorted(runs, key=lambda run: run.started)[-RUNS:]


def _look(run_dir: str) -> RunOnNode | None:
    try:
        record = frames.decode(folders.read_regular(os.path.join(run_dir, processes.RECORD), RECORD_BYTES))
        pid, attempt = int(record["pid"]), int(record["attempt"])
        is_running = processes.identity(pid) == record["identity"] != ""
        origin = record.get("origin", {})
        ended = None if is_running else _end(os.path.join(run_dir, "attempt-%d" % attempt))
        return RunOnNode(
            run=os.path.basename(run_dir),
            token=str(record["token"]),
            attempt=attempt,
            keep=bool(record["keep"]),
            is_running=is_running,
            started=float(origin.get("started", 0)),
            launched_from=str(origin.get("launched_from", "")),
            command=str(origin.get("command", "")),
            exit_code=ended,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, frames.BrokenFrame):
        return None


def _end(attempt_dir: str) -> int | None:
    """The first exit code that is not 0, of an attempt that is over, or 0; None when there is no record of its end."""
    try:
        data = folders.read_regular(os.path.join(attempt_dir, "exit.json"), RECORD_BYTES)
        exits = AttemptStopped.parse(frames.decode(data)).exits
    except (OSError, frames.BrokenFrame, InvalidMessage):
        return None
    return next((each.code for each in exits if each.code), 0)


def read_logs(link: frames.FdLink, workdir: str, request: ReadLogs) -> None:
    """Send what the logs of the newest attempt have beyond some offsets."""
    run_dir = os.path.join(workdir, "runs", request.run)
    run = _look(run_dir)  # before reading, so that nothing printed last is missed
    if run is None:
        raise CannotDo("no-run", "%s is not the folder of a run" % run_dir)
    folder = os.path.join(run_dir, "attempt-%d" % run.attempt)
    offsets = request.offsets if request.attempt == run.attempt else {}
    output_log.send_stored(link, folder, offsets, {})
    link.send_json(LogsRead(attempt=run.attempt, is_running=run.is_running, exit_code=run.exit_code))
