"""A Slurm job, followed as a run: its state, its nodes, its workers' output, and its end.

All state lies on the machine with Slurm's commands (slurm_commands.py reads it there), so that a later follower
continues where the last one stopped (job_files.py).
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from dtctl import names
from dtctl.errors import LaunchError
from dtctl.launch.control import failure as failures
from dtctl.launch.control.controller import Result
from dtctl.launch.control.failure import Failure
from dtctl.launch.records.events import Emit, NodeChanged, Note
from dtctl.launch.records.ledger import WRITE_S
from dtctl.launch.records.record import RunRecord
from dtctl.launch.records.run_writer import RunWriter
from dtctl.launch.records.state import read_run_progress
from dtctl.launch.run_spec import load_run_spec
from dtctl.slurm import batchlog, remote_commands
from dtctl.slurm.answers import JobUpdate
from dtctl.slurm.job_control import CONTROL_FOLDER
from dtctl.slurm.job_files import JobFiles
from dtctl.slurm.job_history import JobHistory, find_job_error
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.job_state import TIME_IS_UP, JobState
from dtctl.slurm.leftover_processes import LeftoverProcesses, end_left_processes
from dtctl.slurm.outputs import count_outputs
from dtctl.slurm.record_sync import METRICS as CONTROL_METRICS
from dtctl.slurm.record_sync import RecordSync
from dtctl.slurm.site import CommandHost, LocalCommandHost
from dtctl.slurm.wait_reasons import explain_end
from dtctl.supervisor import run_workdir
from dtctl.supervisor.slurm_commands import PART_BYTES

ENDED_NODE: Final = ("stopped", "lost", "failed")
"""States of nodes that are final."""
SETTLE_S: Final = 3.0
TAKEN_S: Final = 60.0
"""Seconds until an end counts as final if Slurm does not answer, or if the job's log has a requeue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobVerdict:
    """Verdict on the end of a job."""

    failure: Failure | None = None
    stopped_by: int | None = None
    """Signal that has ended the job."""
    asked_to_stop: bool = False
    is_success: bool = False


class JobWatcher:
    """Follower of one job; each call of `poll_job` emits the news since the last one."""

    def __init__(self, record: RunWriter, ref: JobRef, site: CommandHost, emit: Emit) -> None:
        """Continue where the last follower of this run has stopped."""
        self.record = record
        self.ref = ref
        self.site = site
        self.emit = emit
        self.slurm = JobState(ref.job, emit)
        self.mirror = RecordSync(record, emit)
        """Records of the launcher in the job, if it has one; these take precedence."""
        self.files = JobFiles(record.folder)
        self.history = JobHistory(record, ref, self.files, self.mirror, emit)
        self.is_cancelled = False
        """True if this process has requested the job's cancellation."""
        self.is_asked_to_stop = False
        """True if `dtctl stop` has requested the end of the job."""
        self.has_more = False
        """True if a file had more data at the last poll than one answer can bring."""
        self._ledger_written = 0.0

    # -- one look ---------------------------------------------------------------------------------------------------

    def poll_job(self) -> bool:
        """Emit the news since the last poll; return whether there was any.

        Raises:
            LaunchError: the machine that runs Slurm's commands reports an error.
            ConnectError: that machine cannot be reached.
        """
        history = self.history
        answer = remote_commands.send_login_request(
            self.site, self.ref.python, JobUpdate, job=self.ref.job, folder=self.ref.folder, have=self.files.offsets,
            urgent=self.is_ending,
        )  # fmt: skip
        self.slurm.update(answer.job)
        history.set_job_nodes(answer.job.nodes)
        # A job that prints all the time has news at each poll; only a part of full size shows that more is waiting.
        self.has_more = any(len(data) >= PART_BYTES for _, data in answer.files.values())
        arrived = self.files.receive(answer.files, is_over=self.slurm.is_over)
        control = {name: arrived.pop(name) for name in answer.files if name.startswith(f"{CONTROL_FOLDER}/")}
        for at, event in self.files.copy_events(arrived):
            if isinstance(event, batchlog.WorkersStarted):
                history.read_output(arrived, before=event.attempt)
            history.apply(at, event)
        history.read_output(arrived)
        if self.mirror.copy_arrived_files(control):
            self.files.offsets.pop(CONTROL_METRICS, None)  # a restart may have removed rows and written them again
        if self.slurm.emit_new_state():
            history.nodes = []
        if answer.files:
            self.files.save()
            self._write_ledger()
        return bool(answer.files)

    @property
    def is_ending(self) -> bool:
        """Return whether the job is about to end or has ended, by everything that is known."""
        has_word = self.history.script_code is not None or self.mirror.end is not None or self.history.is_taken_back
        return self.is_cancelled or self.is_asked_to_stop or has_word or self.slurm.is_over

    @property
    def has_ended_finally(self) -> bool:
        """Return whether the job has ended for good; a job that is being requeued appears as cancelled for a moment."""
        history, state = self.history, self.slurm.facts.state
        has_ended = history.script_code is not None and self.mirror.end is not None
        if has_ended and history.script_code == 0:
            return True  # the launcher inside has counted the remaining processes and reported success
        if state == "UNKNOWN" and has_ended:
            return time.monotonic() - history.script_ended_at >= TAKEN_S  # Slurm does not answer, and nothing restarts
        if not self.slurm.is_over:
            return False
        # A lost node ends the script, too, though the job is requeued.
        by_itself = history.script_code is not None and state in ("COMPLETED", "FAILED")
        is_taken_back = history.requeue_cause or history.is_taken_back
        patience_s = TAKEN_S if is_taken_back and state != "TIMEOUT" else SETTLE_S
        return by_itself or self.slurm.seconds_since_end >= patience_s

    def _write_ledger(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if self.mirror.has_begun:
            return  # the launcher inside writes one
        if at_once or now - self._ledger_written >= WRITE_S:
            path = self.record.folder / names.LEDGER_FILE
            self.history.ledger.write(path, attempts=max(0, self.history.number) + 1)
            self._ledger_written = now

    # -- the end ----------------------------------------------------------------------------------------------------

    def result(self, *, stopped_by: int | None) -> Result:
        """Return the result of the job; call this when the job is over.

        Args:
            stopped_by: signal to the launcher that has ended the job; None if there was none.
        """
        history, verdict = self.history, self._judge_end(stopped_by)
        left_behind = self.left_behind()
        outputs = count_outputs(self.site, self.ref, load_run_spec(self.record).job.outputs)
        duration_s = self._duration_s()
        goodput = self._close_ledger(duration_s, succeeded=verdict.is_success)
        told = self.mirror.progress
        for node in told.nodes or history.nodes:
            if told.nodes.get(node) not in ENDED_NODE:
                self.emit(NodeChanged(node=node, state="stopped", left=left_behind.counts.get(node)))
        if left_behind.total is None:
            self.emit(Note(node=self.site.name, text=left_behind.describe()))
        return Result(
            run=self.record.run,
            failure=verdict.failure,
            stopped_by=verdict.stopped_by,
            asked_to_stop=verdict.asked_to_stop,
            attempts=max(0, history.number) + 1,
            launch_s=history.launch_s if history.launch_s is not None else told.launch_s,
            duration_s=duration_s,
            left_behind=left_behind.total,
            lost_output=dict(history.logs.lost),
            outputs=outputs,
            is_local=isinstance(self.site, LocalCommandHost),
            nodes=len(told.nodes or history.nodes),
            goodput=goodput,
        )

    def _judge_end(self, stopped_by: int | None) -> _JobVerdict:
        """Return the cause of the job's end, by Slurm's state of the job and by its records."""
        history, state, code = self.history, self.slurm.facts.state, self._exit_code()
        failure = history.first_failure()
        has_completed = state in ("COMPLETED", "FORGOTTEN") and code == 0
        if has_completed or (history.script_code == 0 and state not in TIME_IS_UP):
            return _JobVerdict(is_success=True)
        if state in TIME_IS_UP and self._has_succeeded:
            text = f"Slurm reports {state}: the time limit was reached after all workers had ended with exit code 0"
            self.emit(Note(node=self.site.name, text=text))
            return _JobVerdict(is_success=True)
        if self.slurm.never and stopped_by is None:
            summary = f"it could never start: {self.slurm.never}"
            return _JobVerdict(failure=replace(self._without_a_word(state), exit_code=1, summary=summary))
        if stopped_by is not None or state == "CANCELLED":
            if stopped_by is None and not self.is_asked_to_stop:
                text = f"job {self.ref.job} was cancelled, by scancel or the site, and not by this launcher"
                self.emit(Note(node=self.site.name, text=text))
            return _JobVerdict(failure=failure, stopped_by=stopped_by or signal.SIGTERM)
        if code == names.REQUEUE_EXIT or state == "PREEMPTED":
            return _JobVerdict(failure=failure, asked_to_stop=True)
        if state in TIME_IS_UP:  # workers that the time limit ended have not failed
            reason = history.requeue_cause or "its time limit was reached"
            ended = replace(self._without_a_word(state), exit_code=128 + signal.SIGTERM, node_reason=reason)
            return _JobVerdict(failure=replace(ended, signal=signal.SIGTERM.value))
        if failure is not None and state == "OUT_OF_MEMORY":
            self.emit(Note(node=self.site.name, text=f"Slurm reports {explain_end(state)}"))
        return _JobVerdict(failure=failure or self._without_a_word(state))

    @property
    def _has_succeeded(self) -> bool:
        """Return whether all workers are known to have succeeded, even if the batch script failed afterwards."""
        if self.history.script_code is not None:
            return self.history.script_code == 0
        if self.mirror.has_begun:
            return self.mirror.end is not None and self.mirror.end.status == "succeeded"
        return self.history.attempt is not None and self.history.attempt.exit_code == 0

    def left_behind(self) -> LeftoverProcesses:
        """Return the remaining processes on the nodes that the job has had; call this when the job is over."""
        told = self.mirror.progress.left if self.mirror.end is not None else {}
        known = {node: left for node, left in told.items() if left is not None}
        nodes = self.history.all_nodes
        counted = {node: known[node] for node in sorted(nodes) if node in known}
        if counted and len(counted) == len(nodes):
            return LeftoverProcesses(counts=counted, evidence="counted on the nodes when the job ended")
        others = end_left_processes(
            self.site, self.ref.python, self.ref.job, self.slurm.facts, sorted(nodes - counted.keys())
        )
        return LeftoverProcesses(counts={**counted, **others.counts}, evidence=others.evidence)

    def _duration_s(self) -> float:
        """Return the seconds from the launch to the job's end in Slurm, or to now if Slurm reports none."""
        end = self.slurm.ended_at
        if end is not None and self.mirror.end is not None:
            end = max(end, self.mirror.end.time)  # Slurm's time has whole seconds
        return max(0.0, (end or time.time()) - self.record.info().started)

    def _exit_code(self) -> int:
        """Return the exit code of the batch script, by the job's log if Slurm no longer reports the job."""
        code = self.slurm.exit_code()
        if code is None:
            code = self.history.script_code
        return 1 if code is None else code

    def _without_a_word(self, state: str) -> Failure:
        """Return the failure of a job without a known failure of a task."""
        tail, log = failures.take_last_lines(self.files.read_log()), ""
        if tail:
            reason = self.history.requeue_cause or find_job_error("\n".join(tail))
            summary = f"job {self.ref.job} ended as {explain_end(state)}" + (f": {reason}" if reason else "")
            log = str(self.files.job_log)
        else:
            summary = (
                f"job {self.ref.job} ended as {explain_end(state)}. It wrote nothing: do the nodes see "
                f"{self.ref.folder}? it must be on a disk that all of them share"
            )
        code = None if state == "NODE_FAIL" else self._exit_code() or None
        node = next(iter(self.history.nodes), self.site.name)
        return Failure(node=node, rank=None, exit_code=code, signal=None, time=0.0, log=log, summary=summary, tail=tail)

    def _close_ledger(self, duration_s: float, *, succeeded: bool) -> float | None:
        """Count all of the run's time in the ledger; return the goodput."""
        if self.mirror.has_begun:
            return self.mirror.close_ledger(duration_s)
        self.history.close_ledger(self.record.info().started + duration_s, succeeded=succeeded)
        with contextlib.suppress(LaunchError):  # a full disk does not change the result of the run
            self._write_ledger(at_once=True)
        return self.history.ledger.facts().goodput


def list_job_nodes(record: RunRecord) -> list[str]:
    """Return all nodes that the job has had, as far as the run's record has them."""
    return sorted(read_run_progress(record).all_nodes)


def cancel_job(site: CommandHost, job: str) -> None:
    """Request the cancellation of a job from Slurm, without waiting for its end.

    Raises:
        LaunchError: Slurm rejects the request.
    """
    done = site.run(["scancel", "--quiet", job])
    if done.code:
        raise LaunchError(f"scancel refused: {done.err.strip()}", where=f"job {job} on {site.name}")


def read_job_reference(record: RunRecord) -> JobRef:
    """Return the reference to the job of a run, from the event of its submission.

    Raises:
        LaunchError: the run was never submitted.
    """
    submitted = read_run_progress(record).job
    if submitted is not None:
        return JobRef(**{field.name: getattr(submitted, field.name) for field in fields(JobRef)})
    raise LaunchError(f"run {record.run} was never submitted", where=str(record.folder))


def snapshot_folder(record: RunRecord) -> str:
    """Return the location of the run's snapshots: a folder, or a URL.

    Raises:
        LaunchError: the run was never submitted, or its snapshots lie on a disk that this machine does not see.
        SpecError: the copy of the run's spec is missing or broken.
    """
    ref, snapshot_dir = read_job_reference(record), load_run_spec(record).snapshot_dir
    if snapshot_dir and "://" in snapshot_dir:
        return snapshot_dir
    folder = Path(ref.folder) / run_workdir.FOLDER / snapshot_dir if snapshot_dir else Path(ref.folder) / "snapshots"
    if not folder.is_dir():
        raise LaunchError(
            "this machine sees no snapshots of the run",
            where=str(folder),
            hint="where the folder is seen, `python -m dtctl.runtime.snapshot` has the same commands",
        )
    return str(folder)
