"""A Slurm job followed as a run: its state, its nodes, its workers' output, how it ended.

All state lies on the machine that runs Slurm's commands (login_agent.py reads it there), so that a later follower
continues where the last one stopped: how much of each file was read is saved in slurm.json, together with the sizes of
the local copies.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from dtctl import folders, names
from dtctl.errors import LaunchError
from dtctl.launch.assemble import spec_of_run
from dtctl.launch.control import failure as failures
from dtctl.launch.control.failure import AGENT, Failure
from dtctl.launch.job import Result
from dtctl.launch.records.events import (
    AttemptRunning,
    AttemptStarting,
    Emit,
    JobQueued,
    LogLine,
    NodeChanged,
    NodesAllocated,
    Note,
    Progress,
    Restarting,
    WorkerExited,
)  # fmt: skip
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.logs import METRICS, Logs
from dtctl.launch.records.record import RUN_BYTES, RunRecord, write_private
from dtctl.launch.records.state import progress_of
from dtctl.slurm import batchlog, login_client
from dtctl.slurm.left import Left, look
from dtctl.slurm.site import Site

STATE_FILE: Final = "slurm.json"
JOB_LOG: Final = "job.log"
RANK_MARK: Final = b"[dtctl:"

WAITING: Final = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED"}
)
RUNNING: Final = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING", "UNKNOWN"})
"""States in which the job goes on. All others are ends."""
SETTLE_S: Final = 3.0
TAKEN_S: Final = 60.0
"""How long to wait before an end counts as final: any end, and that of a job whose log says that it was requeued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRef:
    """A job and where it keeps its files."""

    job: str
    folder: str
    """On the machine that runs Slurm's commands."""
    python: str
    """Interpreter there."""
    workers_apart: bool
    """Whether each worker is a task of its own (kind direct); if not, torchrun marks their lines."""
    slots: int
    max_attempts: int


class Follower:
    """Follows one job; each `look` emits what is new since the last."""

    def __init__(self, record: RunRecord, ref: JobRef, site: Site, emit: Emit) -> None:
        """Go on where the last follower of this run has stopped."""
        self.record = record
        self.ref = ref
        self.site = site
        self.emit = emit
        self.logs = Logs(record)
        self.nodes: list[str] = []
        self._all_nodes: set[str] = set()
        """All nodes that the job was ever given."""
        self.attempt = -1
        self.failures: list[Failure] = []
        self.taken_back = ""
        self.launch_s: float | None = None
        self.state: dict[str, Any] = {}
        self._script_code: int | None = None
        self._over_since: float | None = None
        self._shown_state = ""
        self._offsets: dict[str, int] = {}
        self._restore_position()

    # -- one look ---------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Emit what is new; whether there is more to read at once.

        Raises:
            LaunchError: the machine that runs Slurm's commands reports an error.
            ConnectError: it cannot be reached.
        """
        request = {"op": "look", "job": self.ref.job, "folder": self.ref.folder, "have": self._offsets}
        answer = login_client.ask(self.site, self.ref.python, request)
        self.state = answer["job"]
        self.nodes = self.state.get("nodes") or self.nodes
        self._all_nodes.update(self.nodes)
        files: dict[str, Any] = answer["files"]
        over = self.over
        if not over:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = time.monotonic()
        for name in sorted(files, key=lambda name: name != JOB_LOG):  # first which start the rest belongs to
            offset, data = files[name][0], base64.b64decode(files[name][1])
            complete = data if over else data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
            self._read(name, offset, complete)
            self._offsets[name] = offset + len(complete)
        self._tell_state()
        if files:
            self._save_position()
        return bool(files)

    @property
    def over(self) -> bool:
        """Whether Slurm says that the job has ended."""
        return bool(self.state) and not is_on(self.state)

    @property
    def settled(self) -> bool:
        """Whether it has ended for good: one that is being requeued looks cancelled for a moment."""
        if not self.over or self._over_since is None:
            return False
        # A lost node ends the script, too, and its job is requeued all the same.
        by_itself = self._script_code is not None and self.state["JobState"] in ("COMPLETED", "FAILED")
        patience_s = TAKEN_S if self.taken_back and self.state["JobState"] != "TIMEOUT" else SETTLE_S
        return by_itself or time.monotonic() - self._over_since >= patience_s

    def _read(self, name: str, offset: int, data: bytes) -> None:
        if name == JOB_LOG:
            self._read_job_log(data)
        elif name == names.METRICS_FILE:
            if offset == 0:
                self.logs.begin_metrics(self._node(0))
            self.logs.write(self._node(0), METRICS, data)
        else:
            _, node, file = Path(name).parts
            for rank, chunk in self._by_rank(file, data):
                for line in self.logs.write(node, rank, chunk):
                    self.emit(LogLine(node=node, rank=rank, text=line))

    def _by_rank(self, file: str, data: bytes) -> list[tuple[int, bytes]]:
        """The lines of a log, sorted by the rank that has printed them."""
        if file != "agent.log":
            return [(int(file.removeprefix("rank-").removesuffix(".log")), data)]
        chunks: list[tuple[int, bytes]] = []
        for line in data.splitlines(keepends=True):
            mark, closed, text = line.partition(b"] ")
            marked = closed and mark.startswith(RANK_MARK) and mark[len(RANK_MARK) :].isdigit()
            chunks.append((int(mark[len(RANK_MARK) :]), text) if marked else (AGENT, line))
        return chunks

    def _read_job_log(self, data: bytes) -> None:
        with os.fdopen(os.open(self._job_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
            file.write(data)
        for line in data.decode(errors="replace").splitlines():
            for event in batchlog.read(line):
                if isinstance(event, batchlog.Start):
                    self._start(event.attempt)
                elif isinstance(event, batchlog.ScriptEnded):
                    self._script_code = event.exit_code
                elif isinstance(event, batchlog.TakenBack):
                    self.taken_back = self.taken_back or event.reason  # a requeue by the script says so too
                else:
                    self._on_task_ended(event)

    def _start(self, attempt: int) -> None:
        if self.attempt >= 0:
            first = self._first_failure()
            if first is not None and not self.taken_back:
                cause = Restarting(reason=failures.describe(first), node=first.node, rank=first.rank)
            else:
                cause = Restarting(reason=self.taken_back or "Slurm requeued it")
            self.emit(replace(cause, attempt=attempt, of=self.ref.max_attempts))
        self.attempt, self.failures, self.taken_back, self._script_code = attempt, [], "", None
        self.logs.begin_attempt()
        self.emit(AttemptStarting(attempt=attempt))
        self.emit(NodesAllocated(nodes=tuple(self.nodes)))
        for node in self.nodes:
            self.emit(NodeChanged(node=node, state="running"))
        launch_s = round(time.time() - self.record.info().started, 3)
        self.launch_s = self.launch_s or launch_s
        self.emit(AttemptRunning(attempt=attempt, launch_s=launch_s))

    def _on_task_ended(self, event: batchlog.Ended) -> None:
        rank = event.task if self.ref.workers_apart or event.task is None else AGENT
        if event.exit_code is not None:
            self.emit(WorkerExited(node=event.node, rank=rank, exit_code=event.exit_code, signal=event.signal))
        self.failures.append(
            Failure(
                node=event.node,
                rank=rank,
                exit_code=event.exit_code,
                signal=event.signal,
                time=float(len(self.failures)),
                node_reason=event.reason,
            )
        )

    def _tell_state(self) -> None:
        state, reason = self.state["JobState"], self.state.get("Reason", "")
        shown_state = f"{state} {reason}"
        if shown_state == self._shown_state:
            return
        self._shown_state = shown_state
        if state in WAITING:
            self.nodes = []
            self.emit(JobQueued(job=self.ref.job, state=state, reason=reason, start=self.state.get("start")))

    # -- what is kept -----------------------------------------------------------------------------------------------

    @property
    def _job_log(self) -> Path:
        return self.record.folder / JOB_LOG

    def _node(self, index: int) -> str:
        return self.nodes[index] if index < len(self.nodes) else ""

    def _copies(self) -> dict[str, int]:
        """Size of each copy here."""
        logs = self.record.folder / names.LOGS_DIR
        paths = [*logs.glob("*/*.log"), self._job_log, self.record.folder / names.METRICS_FILE]
        return {str(path.relative_to(self.record.folder)): path.stat().st_size for path in paths if path.exists()}

    def _save_position(self) -> None:
        position = {
            "have": self._offsets,
            "copies": self._copies(),
            "taken": self.taken_back,
            "code": self._script_code,
        }
        write_private(self.record.folder / STATE_FILE, json.dumps(position, indent=1) + "\n")

    def _restore_position(self) -> None:
        try:
            position = json.loads(folders.read_regular(str(self.record.folder / STATE_FILE), RUN_BYTES))
        except (OSError, ValueError, RecursionError):
            position = {"have": {}, "copies": {}, "taken": ""}
        self._offsets, self.taken_back, self._script_code = position["have"], position["taken"], position.get("code")
        # What was copied and not noted before the last follower died is copied again.
        for name in self._copies():
            os.truncate(self.record.folder / name, position["copies"].get(name, 0))
        progress = Progress()
        for event in self.record.events():
            progress.apply(event)
            if isinstance(event, AttemptStarting):
                self.failures = []
            elif isinstance(event, WorkerExited):
                failure = Failure(
                    node=event.node,
                    rank=event.rank,
                    exit_code=event.exit_code,
                    signal=event.signal,
                    time=float(len(self.failures)),
                )
                self.failures.append(failure)
        self.attempt, self.launch_s = progress.attempt, progress.launch_s
        self.nodes, self._all_nodes = list(progress.nodes), progress.all_nodes

    # -- the end ----------------------------------------------------------------------------------------------------

    def _first_failure(self) -> Failure | None:
        details = []
        for failure in self.failures:
            rank = AGENT if failure.rank is None else failure.rank
            text = self.logs.tail(failure.node, rank)
            full = failures.from_torchrun(failure, text) if failure.rank == AGENT else failure
            rank = AGENT if full.rank is None else full.rank
            tail = failures.last_lines(self.logs.tail(failure.node, rank) or text)
            path = self.record.log_path(failure.node, rank)
            log = str(path) if path.exists() else str(self._job_log)
            summary = full.node_reason or failures.summary(tail)
            details.append(
                replace(full, log=log, tail=tail, summary=summary, rank=None if full.rank == AGENT else full.rank)
            )
        return failures.first(details)

    def result(self, ledger: Ledger | None, *, stopped_by: int | None) -> Result:
        """How it ended; call it when it is over.

        Args:
            ledger: of somebody who has followed it all the time; None: nobody has, so where the time went is not known.
            stopped_by: signal that has ended it, if it was one to the launcher.
        """
        state, code = self.state["JobState"], self._exit_code()
        failure = self._first_failure()
        status, exit_code = "failed", 8
        if state in ("COMPLETED", "FORGOTTEN") and code == 0:
            status, exit_code = "succeeded", 0
        elif stopped_by is not None or state == "CANCELLED":
            status, exit_code = "stopped", 128 + (stopped_by or signal.SIGTERM)
        elif code == names.REQUEUE_EXIT or state == "PREEMPTED":
            status, exit_code = "stopped", names.REQUEUE_EXIT
        elif failure is None:
            failure = self._without_a_word(state)
        if ledger is not None:
            ledger.write(self.record.folder / names.LEDGER_FILE, attempts=max(0, self.attempt) + 1)
        left_behind = self.left_behind()
        for node in self.nodes:
            self.emit(NodeChanged(node=node, state="stopped", left=left_behind.counts.get(node)))
        if left_behind.total is None:
            self.emit(Note(node=self.site.name, text=left_behind.describe()))
        return Result(
            run=self.record.run,
            status=status,
            exit_code=exit_code,
            attempts=max(0, self.attempt) + 1,
            first_failure=failure if status == "failed" else None,
            launch_s=self.launch_s,
            duration_s=self._duration_s(),
            left_behind=left_behind.total,
            lost_output=dict(self.logs.lost),
            nodes=len(self.nodes),
            goodput=None,
        )

    def left_behind(self) -> Left:
        """What is left of the job on the nodes that it was given; call it when it is over."""
        return look(self.site, self.ref.python, self.ref.job, self.state, sorted(self._all_nodes))

    def _duration_s(self) -> float:
        """From the launch to the end, as Slurm has it; to now where Slurm does not know it any more."""
        return max(0.0, (self.state.get("end") or time.time()) - self.record.info().started)

    def _exit_code(self) -> int:
        """Exit code of the batch script, 128 + N for a signal; that in its log where Slurm has forgotten the job."""
        code, _, number = str(self.state.get("ExitCode", "")).partition(":")
        if code.isdigit():
            return 128 + int(number) if number.isdigit() and int(number) else int(code)
        return 1 if self._script_code is None else self._script_code

    def _without_a_word(self, state: str) -> Failure:
        """The failure of a job of which no task is known to have failed."""
        if self._job_log.exists():
            tail = failures.last_lines(self._job_log.read_text(errors="replace"))
            summary = f"job {self.ref.job} ended as {state}" + (f": {self.taken_back}" if self.taken_back else "")
            log = str(self._job_log)
        else:
            tail, log = (), ""
            summary = (
                f"job {self.ref.job} ended as {state} and wrote nothing: do the nodes see {self.ref.folder}? "
                "it must be on a disk that all of them share"
            )
        return Failure(
            node=self.nodes[0] if self.nodes else self.site.name, rank=None, exit_code=None, signal=None, time=0.0,
            log=log, summary=summary, tail=tail,
        )  # fmt: skip


def is_on(state: Mapping[str, Any]) -> bool:
    """Whether a job waits or runs."""
    return state["JobState"] in WAITING | RUNNING


def nodes_of(record: RunRecord) -> list[str]:
    """All nodes that the job was ever given, as far as it was followed."""
    return sorted(progress_of(record).all_nodes)


def cancel(site: Site, job: str) -> None:
    """Ask Slurm to end a job; that it has ended is seen later.

    Raises:
        LaunchError: Slurm does not take the request.
    """
    done = site.run(["scancel", "--quiet", job])
    if done.code:
        raise LaunchError(f"scancel refused: {done.err.strip()}", where=f"job {job} on {site.name}")


def reference(record: RunRecord) -> JobRef:
    """The job that a run is, as its event of the submission says.

    Raises:
        LaunchError: it was never submitted.
    """
    submitted = progress_of(record).job
    if submitted is not None:
        return JobRef(**{field.name: getattr(submitted, field.name) for field in fields(JobRef)})
    raise LaunchError(f"run {record.run} was never submitted", where=str(record.folder))


def snapshot_folder(record: RunRecord) -> str:
    """Where the run keeps its snapshots: a folder, or a URL.

    Raises:
        LaunchError: it was never submitted, or they lie where this machine does not see them.
        SpecError: the copy of its spec is gone or broken.
    """
    ref, snapshot_dir = reference(record), spec_of_run(record).snapshot_dir
    if snapshot_dir and "://" in snapshot_dir:
        return snapshot_dir
    folder = Path(ref.folder) / "code" / snapshot_dir if snapshot_dir else Path(ref.folder) / "snapshots"
    if not folder.is_dir():
        raise LaunchError(
            "this machine sees no snapshots of the run",
            where=str(folder),
            hint="where the folder is seen, `python -m dtctl.runtime.snapshot` has the same commands",
        )
    return str(folder)
