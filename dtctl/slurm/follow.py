"""A Slurm job followed as a run: its state, its nodes, its workers' output, how it ended.

All state lies on the machine that runs Slurm's commands (slurm_commands.py reads it there), so that a later follower
continues where the last one stopped: how much of each file was read is saved in slurm.json, together with the sizes of
the local copies.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from dtctl import folders, names
from dtctl.errors import LaunchError
from dtctl.launch.assemble import spec_of_run
from dtctl.launch.control import failure as failures
from dtctl.launch.control.controller import Result
from dtctl.launch.control.failure import AGENT, Failure
from dtctl.launch.records.events import (
    AttemptRunning,
    AttemptStarting,
    Emit,
    Event,
    Hung,
    JobQueued,
    NodeChanged,
    NodesAllocated,
    Note,
    OutputLine,
    Restarting,
    SnapshotBegun,
    Stopping,
    WorkerExited,
)  # fmt: skip
from dtctl.launch.records.ledger import WRITE_S
from dtctl.launch.records.logs import BEGUN_FILE, METRICS, Logs
from dtctl.launch.records.record import RUN_BYTES, RunRecord, write_private
from dtctl.launch.records.state import progress_of
from dtctl.slurm import batchlog, job_record, login_client
from dtctl.slurm.answers import JobFacts, JobLook
from dtctl.slurm.attempt_facts import AttemptFacts, begin
from dtctl.slurm.job_control import CONTROL_FOLDER
from dtctl.slurm.job_ledger import JobLedger
from dtctl.slurm.job_output import JOB_LOG, by_rank
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.left import Left, look
from dtctl.slurm.mirror import METRICS as CONTROL_METRICS
from dtctl.slurm.mirror import WHOLE, Mirror
from dtctl.slurm.outputs import count_outputs
from dtctl.slurm.site import LocalSite, Site
from dtctl.slurm.wait_reasons import NEVER, explain_end, explain_wait
from dtctl.supervisor import work

STATE_FILE: Final = "slurm.json"
CONTROL_WHOLE: Final = frozenset(f"{CONTROL_FOLDER}/{name}" for name in WHOLE)
ENDED_NODE: Final = ("stopped", "lost", "failed")
"""States of a node that nothing follows."""

WAITING: Final = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED"}
)
RUNNING: Final = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING", "UNKNOWN"})
"""States in which the job goes on. All others are ends."""
ERROR_MARK: Final = "dtctl: error: "
"""Before a line of the batch file that says why it could not start the workers."""
TIME_IS_UP: Final = frozenset({"TIMEOUT", "DEADLINE"})
SETTLE_S: Final = 3.0
TAKEN_S: Final = 60.0
"""How long to wait before an end counts as final: any end, and that of a job whose log says that it was requeued."""


class Follower:
    """Follows one job; each `look` emits what is new since the last."""

    def __init__(self, record: RunRecord, ref: JobRef, site: Site, emit: Emit) -> None:
        """Go on where the last follower of this run has stopped."""
        self.record = record
        self.ref = ref
        self.site = site
        self.emit = emit
        self.logs = Logs(record)
        self.mirror = Mirror(record, emit)
        """Of the launcher inside of the job, if it has one: then that has the say."""
        self._is_taken_back = False
        """Whether the newest start of the job was taken back by Slurm, or by its batch file."""
        self.nodes: list[str] = []
        self._all_nodes: set[str] = set()
        """All nodes that the job was ever given."""
        self._counted: dict[str, int | None] = {}
        """Node -> processes that the job's own last step has found left there, unless workers were started since."""
        self.attempt: AttemptFacts | None = None
        """The newest one."""
        self._last_attempt = ref.max_attempts
        """Number that the last attempt has at most, unless Slurm starts the job again."""
        self._saved_step = 0
        """Of the newest snapshot that was told of."""
        self._silent_nodes: set[str] = set()
        """Nodes none of whose workers has printed anything: still at the rendezvous, for all we see."""
        self._early: list[tuple[float, job_record.Event]] = []
        """What was recorded of an attempt whose start was not read yet."""
        self.never = ""
        """Why Slurm will never start it; empty as far as is known."""
        self.is_cancelled = False
        """Whether this process has asked Slurm to end it."""
        self.is_asked_to_stop = False
        """Whether `dtctl stop` has asked for its end."""
        self.launch_s: float | None = None
        self.ledger = JobLedger(record.info().started)
        self._ledger_written = 0.0
        self._wait_s = 0.0
        """How long the batch file waits before the next start."""
        self._silent = False
        """Whether events are those of an earlier follower."""
        self.state: JobFacts | None = None
        """None before the first look."""
        self._script_code: int | None = None
        self._script_ended_at = 0.0
        """When its word was read."""
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
        answer = login_client.ask(
            self.site, self.ref.python, JobLook, job=self.ref.job, folder=self.ref.folder, have=self._offsets,
            urgent=self.is_ending,
        )  # fmt: skip
        self.state, files = answer.job, answer.files
        self.nodes = self.state.nodes or self.nodes
        self._all_nodes.update(self.nodes)
        over = self.over
        if not over:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = time.monotonic()
        arrived: dict[str, tuple[int, bytes]] = {}
        for name, (offset, data) in files.items():
            if name in CONTROL_WHOLE:
                arrived[name], self._offsets[name] = (offset, data), offset
                continue
            complete = data if over else data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
            arrived[name] = offset, complete
            self._offsets[name] = offset + len(complete)
        control = {name: arrived.pop(name) for name in files if name.startswith(f"{CONTROL_FOLDER}/")}
        texts = []
        for name in (JOB_LOG, names.PROGRESS_FILE):
            _, data = arrived.pop(name, (0, b""))
            texts.append(data.decode(errors="replace"))
            _append(self.record.folder / name, data)
        for at, event in job_record.in_order(*(text.splitlines() for text in texts), now=round(time.time(), 3)):
            if isinstance(event, batchlog.Start):
                self._read_logs(arrived, before=event.attempt)
            self._on_event(at, event)
        self._read_logs(arrived)
        if self.mirror.take(control):
            self._offsets.pop(CONTROL_METRICS, None)  # what was taken back may have been written anew
        self._tell_state()
        if files:
            self._save_position()
            self._write_ledger()
        return bool(files)

    @property
    def over(self) -> bool:
        """Whether Slurm says that the job has ended."""
        return self.state is not None and not is_on(self.state)

    @property
    def is_ending(self) -> bool:
        """Whether it is about to end, or has ended, for all that is known."""
        has_word = self._script_code is not None or self.mirror.end is not None or self._is_taken_back
        return self.is_cancelled or self.is_asked_to_stop or has_word or self.over

    @property
    def is_waiting(self) -> bool:
        """Whether Slurm has not started it, or will start it again."""
        return self.state is not None and self.state.state in WAITING

    @property
    def settled(self) -> bool:
        """Whether it has ended for good: one that is being requeued looks cancelled for a moment."""
        has_ended = self._script_code is not None and self.mirror.end is not None
        if has_ended and self._script_code == 0:
            return True  # the launcher inside has counted what is left, and said that all is well
        if self.state is not None and self.state.state == "UNKNOWN" and has_ended:
            return time.monotonic() - self._script_ended_at >= TAKEN_S  # Slurm is silent, and nothing begins anew
        if self.state is None or not self.over or self._over_since is None:
            return False
        # A lost node ends the script, too, and its job is requeued all the same.
        by_itself = self._script_code is not None and self.state.state in ("COMPLETED", "FAILED")
        is_taken_back = self.taken_back or self._is_taken_back
        patience_s = TAKEN_S if is_taken_back and self.state.state != "TIMEOUT" else SETTLE_S
        return by_itself or time.monotonic() - self._over_since >= patience_s

    def _read_logs(self, arrived: dict[str, tuple[int, bytes]], *, before: int | None = None) -> None:
        """Take in what has arrived of the workers' files; `before`: only of attempts before this one."""
        for name in sorted(arrived, key=_attempt_of):
            if before is not None and _attempt_of(name) >= before:
                continue
            offset, data = arrived.pop(name)
            if name == names.METRICS_FILE:
                if offset == 0:
                    self.logs.begin_metrics(self._node(0))
                self.logs.write(self._node(0), METRICS, data)
                for silent in sorted(self._silent_nodes):  # all take part in a step
                    self._runs(silent)
                continue
            kind, _, node, file = Path(name).parts
            if kind == names.HANGS_DIR:
                _append(self.record.folder / name, data)
                continue
            if data:
                self._runs(node)
            for rank, chunk in by_rank(file, data):
                for line in self.logs.write(node, rank, chunk):
                    self.emit(OutputLine(node=node, rank=rank, text=line))

    # -- events -----------------------------------------------------------------------------------------------------

    def _on_event(self, at: float, event: job_record.Event) -> None:
        """Act on what the job's log or its record says; `at`: when it was, in seconds since the epoch."""
        if isinstance(event, batchlog.Start):
            self._on_start(event)
            early, self._early = self._early, []
            for moment, recorded in early:
                self._on_event(moment, recorded)
            return
        if isinstance(event, batchlog.Begun):
            self._is_taken_back, self._script_code = False, None
            self._counted.clear()
        elif isinstance(event, batchlog.Requeued) or (isinstance(event, batchlog.TakenBack) and self.attempt is None):
            self._is_taken_back = True
            if isinstance(event, batchlog.TakenBack):
                self.mirror.requeue_reason = self.mirror.requeue_reason or event.reason  # a requeue says so, too
        elif isinstance(event, batchlog.NotLive):
            self._tell(Note(time=at, text=f"lost workers are not replaced alone: {event.reason}"))
        elif isinstance(event, batchlog.ScriptEnded):
            self._script_code, self._script_ended_at = event.exit_code, time.monotonic()
        elif isinstance(event, batchlog.NotRestarted):
            first = self._first_failure()
            self._tell(Note(time=at, node=first.node if first else None, text=f"not restarted: {event.reason}"))
        elif isinstance(event, batchlog.Waiting):
            self._wait_s = event.seconds
        elif isinstance(event, batchlog.LeftOnNode):
            self._counted[event.node] = event.processes
        elif getattr(event, "attempt", self.number) > self.number:
            self._early.append((at, event))
        elif self.attempt is not None and getattr(event, "attempt", self.number) == self.number:
            self._on_news(at, event, self.attempt)

    @property
    def taken_back(self) -> str:
        """Why Slurm, or the batch file, has taken the job back; empty when neither has."""
        return self.mirror.requeue_reason if self.attempt is None else self.attempt.taken_back

    @property
    def number(self) -> int:
        """Of the newest attempt; -1 before the first one."""
        return self.mirror.progress.attempt if self.attempt is None else self.attempt.number

    def _on_news(self, at: float, event: job_record.Event, attempt: AttemptFacts) -> None:
        """Something happened in the attempt that is on."""
        was_ended = attempt.hangs
        attempt.apply(at, event)
        match event:
            case batchlog.StepEnded():
                self._on_step_ended(event)
            case batchlog.Ended() if not was_ended:
                self.ledger.fail()
                if event.exit_code is not None:
                    rank = attempt.rank_of(event)
                    self._tell(
                        WorkerExited(
                            time=at, node=event.node, rank=rank, exit_code=event.exit_code, signal=event.signal
                        )
                    )
            case job_record.RecordedProgress():
                self.ledger.progress(at, event.worker)
                if event.worker.saved > max(event.worker.first, self._saved_step):
                    self._saved_step = event.worker.saved
                    self._tell(SnapshotBegun(time=at, step=event.worker.saved))
            case job_record.Hang():
                self._tell(Hung(time=at, silent_s=event.silent_s))
            case job_record.Verdict():
                self._tell(Stopping(time=at, reason=event.failure.summary))
                self.ledger.fail(hung_s=event.silent_s)

    def _on_start(self, event: batchlog.Start) -> None:
        if self.attempt is not None:
            first, taken_back = self._first_failure(), self.attempt.taken_back
            if first is not None and not taken_back:
                reason = failures.describe(first)
                cause = Restarting(reason=reason, node=first.node, rank=first.rank, exit_code=first.exit_code)
            else:
                lost = first if first is not None and first.exit_code is None else None
                cause = Restarting(reason=taken_back or "Slurm requeued it", node=lost.node if lost else None)
                self._last_attempt = event.attempt + self.ref.max_attempts
            if event.attempt > self._last_attempt:  # Slurm has started the job again, and the budget with it
                self._last_attempt = event.attempt + self.ref.max_attempts
            self._tell(
                replace(cause, time=event.time, attempt=event.attempt, of=self._last_attempt, wait_s=self._wait_s)
            )
        self.attempt = begin(event, workers_apart=self.ref.workers_apart)
        self._script_code = None
        for node in event.nodes:
            self._counted.pop(node, None)
        self.ledger.start(event.time, event.attempt, idle_s=self._wait_s)
        self._wait_s = 0.0
        self.launch_s = self.launch_s or max(0.0, event.time - self.record.info().started)
        self.nodes = list(event.nodes) or self.nodes
        self._all_nodes.update(self.nodes)
        if self._silent:
            return
        self.logs.begin_attempt()
        plan = self._plan_of(event)
        self._tell(
            AttemptStarting(
                time=event.time,
                attempt=event.attempt,
                rendezvous=event.rendezvous,
                world_size=plan.get("world_size"),
            )
        )
        self._tell(NodesAllocated(time=event.time, nodes=tuple(self.nodes)))
        self._silent_nodes = set(self.nodes)
        for node in self.nodes:
            self._tell(NodeChanged(time=event.time, node=node, state="started"))
        self._tell(AttemptRunning(time=event.time, attempt=event.attempt, launch_s=round(self.launch_s, 3)))

    def _plan_of(self, event: batchlog.Start) -> dict[str, Any]:
        """The run's plan, with the nodes that Slurm has given it: as a launch over SSH records it for each attempt."""
        plan = self.record.plan()
        nodes = plan.get("nodes", [])
        if len(nodes) != len(self.nodes):
            return plan
        address, _, port = event.rendezvous.rpartition(":")
        for node, name in zip(nodes, self.nodes, strict=True):
            node |= {"name": name, "address": name}
        plan |= {"attempt": event.attempt, "rendezvous": {**plan["rendezvous"], "address": address, "port": int(port)}}
        with contextlib.suppress(LaunchError):  # a full disk
            write_private(self.record.folder / names.PLAN_FILE, json.dumps(plan, indent=1) + "\n")
        return plan

    def _on_step_ended(self, event: batchlog.StepEnded) -> None:
        self.ledger.end(event.time)
        if event.exit_code or self._silent:
            return  # srun tells of those that failed
        for node in self.record.plan().get("nodes", []):
            first, slots = node.get("first_rank", 0), node.get("slots", 0)
            for rank in range(first, first + slots) if self.ref.workers_apart else (AGENT,):
                self._tell(WorkerExited(time=event.time, node=node["name"], rank=rank, exit_code=0))

    def _runs(self, node: str) -> None:
        """A node's workers have printed something, or taken a step."""
        if node in self._silent_nodes:
            self._silent_nodes.discard(node)
            self.emit(NodeChanged(node=node, state="running"))

    def _tell(self, event: Event) -> None:
        """Emit an event at the time that it has; not one that an earlier follower has emitted."""
        if not self._silent:
            self.emit(event)

    def _tell_state(self) -> None:
        if self.state is None:
            return
        state, reason = self.state.state, self.state.reason
        shown_state = f"{state} {reason}"
        if shown_state == self._shown_state:
            return
        self._shown_state = shown_state
        if state in WAITING:
            self.nodes = []
            self.never = explain_wait(self.ref.job, reason) if reason in NEVER else ""
            self.emit(JobQueued(job=self.ref.job, state=state, reason=reason, start=self.state.start))

    # -- what is kept -----------------------------------------------------------------------------------------------

    @property
    def _job_log(self) -> Path:
        return self.record.folder / JOB_LOG

    def _node(self, index: int) -> str:
        return self.nodes[index] if index < len(self.nodes) else ""

    def _save_position(self) -> None:
        position = {"have": self._offsets, "copies": _copies(self.record.folder)}
        write_private(self.record.folder / STATE_FILE, json.dumps(position, indent=1) + "\n")

    def _restore_position(self) -> None:
        """Be where the last follower was: by what it has copied, whose events it has emitted."""
        self._offsets = drop_unnoted(self.record.folder)
        texts = [_text_of(self.record.folder / name) for name in (JOB_LOG, names.PROGRESS_FILE)]
        self._silent = True
        for at, event in job_record.in_order(*(text.splitlines() for text in texts), now=round(time.time(), 3)):
            self._on_event(at, event)
        self._silent = False
        if (self.record.folder / BEGUN_FILE).exists():
            self.logs.rejoin()

    def _close_ledger(self, duration_s: float, *, succeeded: bool) -> float | None:
        """Count all of the run's time; return the goodput."""
        if self.mirror.has_begun:
            return self.mirror.close_ledger(duration_s)
        self.ledger.close(self.record.info().started + duration_s, succeeded=succeeded)
        with contextlib.suppress(LaunchError):  # a full disk changes nothing about how the run ended
            self._write_ledger(at_once=True)
        return self.ledger.ledger.facts().goodput

    def _write_ledger(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if self.mirror.has_begun:
            return  # there is that of the launcher inside
        if at_once or now - self._ledger_written >= WRITE_S:
            self.ledger.ledger.write(self.record.folder / names.LEDGER_FILE, attempts=max(0, self.number) + 1)
            self._ledger_written = now

    # -- the end ----------------------------------------------------------------------------------------------------

    def _first_failure(self) -> Failure | None:
        if self.mirror.has_begun:
            return self.mirror.failure()
        failure = self.attempt.first_failure(self.logs) if self.attempt is not None else None
        if failure is None or self.attempt is None:
            return None
        if failure.hang and failure.rank is not None:
            folder = self.record.folder / names.HANGS_DIR / f"attempt-{self.number}" / failure.node
            failure = replace(failure, log=str(folder / f"rank-{failure.rank}.txt"))
        if not failure.log or Path(failure.log).is_file():
            return failure
        summary = failure.summary or job_error(_text_of(self._job_log))
        return replace(failure, log="" if failure.hang else str(self._job_log), summary=summary)

    def result(self, *, stopped_by: int | None) -> Result:
        """How it ended; call it when it is over.

        Args:
            stopped_by: signal that has ended it, if it was one to the launcher.
        """
        state, code = self._facts.state, self._exit_code()
        failure, asked_to_stop, is_success = self._first_failure(), False, False
        if (state in ("COMPLETED", "FORGOTTEN") and code == 0) or (self._script_code == 0 and state not in TIME_IS_UP):
            failure, stopped_by, is_success = None, None, True
        elif state in TIME_IS_UP and self._has_succeeded:
            text = f"Slurm reports {state}: the time limit was reached after all workers had ended with exit code 0"
            self.emit(Note(node=self.site.name, text=text))
            failure, stopped_by, is_success = None, None, True
        elif self.never and stopped_by is None:
            failure = replace(self._without_a_word(state), exit_code=1, summary=f"it could never start: {self.never}")
        elif stopped_by is not None or state == "CANCELLED":
            if stopped_by is None and not self.is_asked_to_stop:
                text = f"job {self.ref.job} was cancelled, by scancel or the site, and not by this launcher"
                self.emit(Note(node=self.site.name, text=text))
            stopped_by = stopped_by or signal.SIGTERM
        elif code == names.REQUEUE_EXIT or state == "PREEMPTED":
            asked_to_stop = True
        elif state in TIME_IS_UP:  # who was ended by that has not failed
            reason = self.taken_back or "its time limit was reached"
            code = 128 + signal.SIGTERM
            failure = replace(
                self._without_a_word(state), exit_code=code, signal=signal.SIGTERM.value, node_reason=reason
            )
        elif failure is None:
            failure = self._without_a_word(state)
        elif state == "OUT_OF_MEMORY":
            self.emit(Note(node=self.site.name, text=f"Slurm reports {explain_end(state)}"))
        left_behind = self.left_behind()
        outputs = count_outputs(self.site, self.ref, spec_of_run(self.record).job.outputs)
        duration_s = self._duration_s()
        goodput = self._close_ledger(duration_s, succeeded=is_success)
        told = self.mirror.progress
        for node in told.nodes or self.nodes:
            if told.nodes.get(node) not in ENDED_NODE:
                self.emit(NodeChanged(node=node, state="stopped", left=left_behind.counts.get(node)))
        if left_behind.total is None:
            self.emit(Note(node=self.site.name, text=left_behind.describe()))
        return Result(
            run=self.record.run,
            failure=failure,
            stopped_by=stopped_by,
            asked_to_stop=asked_to_stop,
            attempts=max(0, self.number) + 1,
            launch_s=self.launch_s if self.launch_s is not None else told.launch_s,
            duration_s=duration_s,
            left_behind=left_behind.total,
            lost_output=dict(self.logs.lost),
            outputs=outputs,
            is_local=isinstance(self.site, LocalSite),
            nodes=len(told.nodes or self.nodes),
            goodput=goodput,
        )

    @property
    def _has_succeeded(self) -> bool:
        """Whether all workers are known to have ended with success, whatever became of the batch script after that."""
        if self._script_code is not None:
            return self._script_code == 0
        if self.mirror.has_begun:
            return self.mirror.end is not None and self.mirror.end.status == "succeeded"
        return self.attempt is not None and self.attempt.exit_code == 0

    @property
    def _facts(self) -> JobFacts:
        """What Slurm said at the last look."""
        return self.state or JobFacts(state="UNKNOWN")

    def left_behind(self) -> Left:
        """What is left of the job on the nodes that it was given; call it when it is over."""
        known = {**self._counted}
        if self.mirror.end is not None:
            known |= {node: left for node, left in self.mirror.progress.left.items() if left is not None}
        counted = {node: known[node] for node in sorted(self._all_nodes) if node in known}
        if counted and len(counted) == len(self._all_nodes):
            return Left(counts=counted, evidence="counted on the nodes when the job ended")
        others = look(self.site, self.ref.python, self.ref.job, self._facts, sorted(self._all_nodes - counted.keys()))
        return Left(counts={**counted, **others.counts}, evidence=others.evidence)

    def _duration_s(self) -> float:
        """From the launch to the end, as Slurm has it; to now where Slurm does not know it, or has not noticed it."""
        end = self._facts.end if self.over else None  # of a job that runs it is the time limit
        if end is not None and self.mirror.end is not None:
            end = max(end, self.mirror.end.time)  # Slurm's is in whole seconds
        return max(0.0, (end or time.time()) - self.record.info().started)

    def _exit_code(self) -> int:
        """Exit code of the batch script, 128 + N for a signal; that in its log where Slurm has forgotten the job."""
        code, _, number = self._facts.exit_code.partition(":")
        if code.isdigit():
            return 128 + int(number) if number.isdigit() and int(number) else int(code)
        return 1 if self._script_code is None else self._script_code

    def _without_a_word(self, state: str) -> Failure:
        """The failure of a job of which no task is known to have failed."""
        tail, log = failures.last_lines(_text_of(self._job_log)), ""
        if tail:
            reason = self.taken_back or job_error("\n".join(tail))
            summary = f"job {self.ref.job} ended as {explain_end(state)}" + (f": {reason}" if reason else "")
            log = str(self._job_log)
        else:
            summary = (
                f"job {self.ref.job} ended as {explain_end(state)}. It wrote nothing: do the nodes see "
                f"{self.ref.folder}? it must be on a disk that all of them share"
            )
        code = None if state == "NODE_FAIL" else self._exit_code() or None
        return Failure(
            node=self.nodes[0] if self.nodes else self.site.name, rank=None, exit_code=code, signal=None, time=0.0,
            log=log, summary=summary, tail=tail,
        )  # fmt: skip


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)


def drop_unnoted(folder: Path) -> dict[str, int]:
    """Cut off what a follower had copied and not noted when it died, so that it is copied again, once.

    Before anybody is told that the job is followed again: whoever reads the copies meanwhile would see them shrink, and
    the same lines twice.

    Args:
        folder: of the run, here.

    Returns:
        File of the job -> bytes of it that are here.
    """
    try:
        position = json.loads(folders.read_regular(str(folder / STATE_FILE), RUN_BYTES))
    except (OSError, ValueError, RecursionError):
        position = {"have": {}, "copies": {}}
    for name in _copies(folder):
        os.truncate(folder / name, position["copies"].get(name, 0))
    return dict(position["have"])


def _copies(folder: Path) -> dict[str, int]:
    """Size of each copy of a job's files."""
    paths = [*(folder / names.LOGS_DIR).glob("*/*.log"), *(folder / names.HANGS_DIR).glob("*/*/*")]
    paths += [folder / name for name in (JOB_LOG, names.METRICS_FILE, names.PROGRESS_FILE)]
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths if path.exists()}


def _attempt_of(name: str) -> int:
    """The attempt that a file of the job belongs to; -1 of one that all share."""
    parts = Path(name).parts
    return int(parts[1].partition("-")[2]) if len(parts) > 1 else -1


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def job_error(log: str) -> str:
    """Why the batch file could not start the workers, by its own words; empty when it says nothing of that."""
    marks = [line.removeprefix(ERROR_MARK) for line in log.splitlines() if line.startswith(ERROR_MARK)]
    return marks[-1] if marks else ""


def is_on(job: JobFacts) -> bool:
    """Whether a job waits or runs."""
    return job.state in WAITING | RUNNING


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
    folder = Path(ref.folder) / work.FOLDER / snapshot_dir if snapshot_dir else Path(ref.folder) / "snapshots"
    if not folder.is_dir():
        raise LaunchError(
            "this machine sees no snapshots of the run",
            where=str(folder),
            hint="where the folder is seen, `python -m dtctl.runtime.snapshot` has the same commands",
        )
    return str(folder)
