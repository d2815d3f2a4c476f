"""Ledger of a run's time: each moment belongs to exactly one phase, so the phases add up to the wall time.

The launcher sets its own phases. While the job runs, the workers report progress (progress.py), and time is moved from
one phase to another according to their reports: waits for a snapshot from `useful` to `stall`, and the steps that the
next attempt has to do again from `useful` to `lost`. A move does not change the sum of the phases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from dtctl import folders
from dtctl.launch.control.progress import RankProgress, ReportedPhase
from dtctl.launch.records.record import RUN_BYTES
from dtctl.launch.records.run_writer import write_private
from dtctl.schema import (
    Record,
    check_number,
    define_record_key,
    list_of,
    make_nullable_check,
    make_text_check,
    make_two_item_check,
    mapping_of,
)
from dtctl.supervisor.messages.base import COUNT

PHASES = (
    "connect",  # until all nodes are ready
    "push",
    "copy",  # checkpoints are brought to all nodes before an attempt (job.shared)
    "start",  # from the start message to the first step: interpreter, imports, rendezvous, loading the snapshot
    "run",  # the job runs and reports no progress: a program without dtctl.runtime
    "useful",  # steps that count
    "stall",  # training stood still for a snapshot
    "evaluation",
    "lost",  # steps that had to be done again, or that have lost their result
    "hang",
    "detect",  # a worker was lost, and this was not detected yet
    "heal",  # lost workers are replaced, the others wait
    "restart",  # from a failure to the next start
    "idle",  # waiting on purpose before a restart
    "stop",  # from the end of training to the last process
)
WRITE_S = 5.0
MAX_MARKS = 4096
MAX_COURSE = 1000


class LedgerFacts(Record):
    """Time of a run by phase, as in ledger.json; versions of dtctl write different keys."""

    wall_s: float = define_record_key(check_number, default=0.0)
    attempts: int | None = define_record_key(make_nullable_check(COUNT), default=None)
    phases_s: dict[str, float] = define_record_key(mapping_of(make_text_check(40), check_number, 100), default={})
    goodput: float | None = define_record_key(make_nullable_check(check_number), default=None)
    """Share of `wall_s` that was spent on steps that were not lost; None if the job reports no steps."""
    steps: int | None = define_record_key(make_nullable_check(COUNT), default=None)
    steps_lost: int | None = define_record_key(make_nullable_check(COUNT), default=None)
    phase: str = define_record_key(make_text_check(40), default="")
    """Current phase of the run."""
    copied_bytes: int = define_record_key(COUNT, default=0)
    """Bytes of checkpoints that were copied between nodes while workers ran (job.shared)."""
    copied_s: float = define_record_key(check_number, default=0.0)
    """Seconds of these copies, which are not a phase, since training continued."""
    counted_s: dict[str, float] = define_record_key(mapping_of(make_text_check(40), check_number, 100), default={})
    """Seconds that were moved to each phase in the current attempt, or the last one."""
    course: list[tuple[str, float]] = define_record_key(
        list_of(make_two_item_check(make_text_check(40), check_number)), default=[]
    )
    """Phases in their order, each with its beginning in seconds since the beginning of the run."""

    def extend(self, phase: str, wall_s: float) -> LedgerFacts:
        """Return the facts of a run of `wall_s` seconds, in which the time not counted here belongs to `phase`."""
        since_s = wall_s - self.wall_s
        if since_s <= 0:
            return self
        useful_s = self.phases_s.get("useful", 0.0)
        changed = {
            "wall_s": round(wall_s, 3),
            "phases_s": {**self.phases_s, phase: round(self.phases_s.get(phase, 0.0) + since_s, 3)},
            "goodput": None if self.goodput is None else round(useful_s / wall_s, 4),
            "phase": phase,
            "course": self.course if phase == self.phase else [*self.course, (phase, self.wall_s)],
        }
        return LedgerFacts(**{**vars(self), **changed})


def read_ledger(path: Path) -> LedgerFacts | None:
    """Return the contents of a ledger.json; None if the file is missing or is not a ledger."""
    try:
        return LedgerFacts.parse(json.loads(folders.read_regular(str(path), RUN_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None


def write_ledger(path: Path, facts: LedgerFacts) -> None:
    """Replace a ledger.json in one step.

    Raises:
        LaunchError: the file cannot be written.
    """
    write_private(path, json.dumps(vars(facts)) + "\n")


class Ledger:
    """Stopwatch that counts the time of a run to one phase at a time."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        begun: float | None = None,
        phase: str = "connect",
        path: Path | None = None,
    ) -> None:
        """Begin with a phase.

        Args:
            clock: monotonic clock in seconds.
            begun: beginning of the run on that clock; None: now.
            phase: first phase.
            path: file that is written regularly; None: only `write` writes a file.
        """
        self._clock = clock
        self.begun = clock() if begun is None else begun
        self.phase = phase
        self.path = path
        self.attempts = 1
        self._phase_start = self.begun
        self.spent: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.steps_lost = 0
        self.copied_bytes, self.copied_s = 0, 0.0
        """Bytes that were copied between nodes while workers ran, and the seconds that the copies took."""
        self._newest_progress: RankProgress | None = None
        """Newest progress of the smallest reporting rank, in the current attempt or the last one."""
        self._attempt_runs = False
        """True if the workers of the current attempt have begun their first step."""
        self._moved_s = {"stall": 0.0, "evaluation": 0.0}
        """Seconds of this attempt that have been moved to these phases."""
        self._marks: list[tuple[int, float]] = []
        """Numbers of steps done in this attempt, each with the seconds of `useful` at that time."""
        self._run_begun = self.begun
        self._last_write = self.begun
        self._course: list[tuple[str, float]] = [(phase, 0.0)]
        """Phases in their order, each with the second at which it began. Time that was moved is included only if it is
        one interval."""

    def enter(self, phase: str) -> None:
        """Count the time from now on to `phase`."""
        now = self._clock()
        self.spent[self.phase] += now - self._phase_start
        self.phase, self._phase_start = phase, now
        self.mark(phase, now)

    def mark(self, phase: str, since: float) -> None:
        """Record in the course that `phase` began at `since` on the clock; drop later entries."""
        at_s = since - self.begun
        while len(self._course) > 1 and self._course[-1][1] >= at_s:
            self._course.pop()
        if self._course[-1][0] != phase:
            self._course.append((phase, at_s))
        if len(self._course) > MAX_COURSE:
            del self._course[1]

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move seconds from the phase `source` to `target`, but no more than `source` has."""
        self.enter(self.phase)
        seconds = min(max(0.0, seconds), self.spent[source])
        self.spent[source] -= seconds
        self.spent[target] += seconds

    def total_s(self) -> float:
        """Return the seconds since the beginning of the run."""
        return self._clock() - self.begun

    # -- reports of the workers -------------------------------------------------------------------------------------

    def record_worker_progress(self, workers: Sequence[RankProgress]) -> None:
        """Record the progress of the smallest rank, which stands for all workers."""
        worker = min(workers, key=lambda worker: worker.rank)
        newest = self._newest_progress
        if worker.phase == ReportedPhase.STARTING or (
            self._attempt_runs and newest is not None and worker.rank > newest.rank
        ):
            return
        if not self._attempt_runs:
            self._start_useful_time(worker)
        elif newest is not None and worker.first != newest.first:  # The worker has returned to a snapshot by itself.
            self._count_lost_steps(worker.first)
            self._marks = [(worker.first, self.spent["useful"])]
        if newest is not None and newest.rank == worker.rank and newest.pid != worker.pid:
            self._moved_s = dict.fromkeys(self._moved_s, 0.0)  # A replacement of the worker counts from 0.
        self.enter(self.phase)
        for name, seconds in (("stall", worker.stall_s), ("evaluation", worker.evaluation_s)):
            self.move("useful", name, seconds - self._moved_s[name])
            self._moved_s[name] = max(self._moved_s[name], seconds)
        self._marks.append((worker.step, self.spent["useful"]))
        if len(self._marks) > MAX_MARKS:
            del self._marks[1:-1:2]
        self._newest_progress = worker
        if worker.phase == ReportedPhase.ENDING and self.phase == "useful":
            self.enter("stop")  # No more steps follow.
        if self.path is not None and self._clock() - self._last_write >= WRITE_S:
            self.write(self.path, attempts=self.attempts)

    def _start_useful_time(self, worker: RankProgress) -> None:
        """Begin to count steps: the time before them was the start, and repeated steps of the last attempt are lost."""
        self._count_lost_steps(worker.first)
        self._attempt_runs = True
        self._moved_s = dict.fromkeys(self._moved_s, 0.0)
        self._newest_progress = worker
        before_s, phase = self.spent["useful"], self.phase
        self.enter("useful")
        if phase == "run":
            since_s = self._clock() - self._run_begun
            self.move("run", "useful", min(worker.begun_s, since_s))
            self.move("run", "start", since_s - worker.begun_s)
            self.mark("start", self._run_begun)
            self.mark("useful", self._clock() - min(worker.begun_s, since_s))
        self._marks = [(worker.first, before_s)]

    def record_processes_started(self) -> None:
        """Record that the processes of an attempt run; they may never report any progress."""
        self._attempt_runs = False
        self.enter("run")
        self._run_begun = self._phase_start

    def record_worker_loss(self, detect_s: float) -> None:
        """Record that a worker was lost `detect_s` seconds ago and is being replaced now."""
        phase = self.phase
        self.enter("heal")
        self.move(phase, "detect", detect_s)
        if detect_s:
            self.mark("detect", self._clock() - detect_s)
            self.mark("heal", self._clock())

    def record_attempt_end(self, *, failed_s: float = 0.0, hung_s: float = 0.0) -> None:
        """Record the end of an attempt.

        Args:
            failed_s: seconds since its failure, in which it was being ended.
            hung_s: seconds without progress before that, if the attempt was ended because of a hang.
        """
        phase = self.phase
        self.enter("stop")
        if self._attempt_runs and self._newest_progress is not None:
            self.move("useful", "restart", failed_s)
            self.move("useful", "hang", hung_s)
            if phase == "useful":
                now = self._clock()
                self.mark("hang", now - failed_s - hung_s)
                self.mark("restart", now - failed_s)
                self.mark("stop", now)
            self._marks.append((self._newest_progress.step, self.spent["useful"]))
        elif phase == "run" and self._newest_progress is not None:  # The attempt never reached its first step.
            self.move("run", "start", self._clock() - self._run_begun)
            self.mark("start", self._run_begun)
            self.mark("stop", self._clock())
        self._attempt_runs = False

    def close(self, *, succeeded: bool) -> None:
        """Finish the ledger: steps since the last snapshot are lost, unless the run has succeeded."""
        if not succeeded and self._newest_progress is not None:
            self._count_lost_steps(self._newest_progress.saved)

    def _count_lost_steps(self, saved_step: int) -> None:
        """Count the steps of the last attempt after step `saved_step` as lost."""
        if self._newest_progress is None or not self._marks:
            return
        end_step, end_s = self._marks[-1]
        if end_step > saved_step:
            self.steps_lost += end_step - saved_step
        since_s = _time_at_step(self._marks, saved_step)
        self.move("useful", "lost", end_s - since_s)
        self._marks = []

    # -- the file ---------------------------------------------------------------------------------------------------

    def facts(self) -> LedgerFacts:
        """Return the time by phase so far."""
        self.enter(self.phase)
        wall_s = self._phase_start - self.begun
        step = None if self._newest_progress is None else self._newest_progress.step
        useful_s = self.spent["useful"] if step is not None else None
        return LedgerFacts(
            wall_s=round(wall_s, 3),
            attempts=self.attempts,
            phases_s={phase: round(spent, 3) for phase, spent in self.spent.items()},
            goodput=None if useful_s is None else round(useful_s / max(1e-9, wall_s), 4),
            steps=step,
            steps_lost=self.steps_lost,
            phase=self.phase,
            copied_bytes=self.copied_bytes,
            copied_s=round(self.copied_s, 3),
            counted_s={name: round(seconds, 3) for name, seconds in self._moved_s.items()},
            course=[(phase, round(at_s, 3)) for phase, at_s in self._course],
        )

    def write(self, path: Path, *, attempts: int) -> None:
        """Write the time by phase so far in one step.

        Raises:
            LaunchError: the file cannot be written.
        """
        self.attempts = attempts
        self._last_write = self._clock()
        write_ledger(path, self.facts())

    def resume(self, path: Path) -> None:
        """Continue the ledger of a launcher that was killed.

        The job continued without a launcher, so the time since the last write counts to the phase of the job. Workers
        report stalls and evaluations of that time later, and these are moved then.
        """
        facts = read_ledger(path)
        if facts is None or not self._moved_s.keys() <= facts.counted_s.keys():
            return  # Without a ledger, or with one of an older version, all time counts to the running phase.
        spent = {phase: facts.phases_s.get(phase, 0.0) for phase in PHASES}
        moved_s = {name: facts.counted_s[name] for name in self._moved_s}
        now = self._clock()
        since_s = (now - self.begun) - sum(spent.values())
        if since_s < 0:
            return
        useful = spent["useful"] > 0 or facts.phase == "useful"
        self.spent, self._phase_start, self.phase = spent, now, "useful" if useful else "run"
        self.spent[self.phase] += since_s
        self._run_begun, self._attempt_runs = now - since_s, useful
        self._moved_s, self.steps_lost = moved_s, facts.steps_lost or 0
        self.copied_bytes, self.copied_s = facts.copied_bytes, facts.copied_s
        self._course = list(facts.course) or self._course
        self.mark(self.phase, now - since_s)


def _time_at_step(marks: Sequence[tuple[int, float]], step: int) -> float:
    """Return the seconds at which a step was done, by linear interpolation between the marks around it."""
    previous = marks[0]
    for mark in marks:
        if mark[0] > step:
            if previous[0] > step:
                return previous[1]
            share = (step - previous[0]) / (mark[0] - previous[0])
            return previous[1] + share * (mark[1] - previous[1])
        previous = mark
    return previous[1]
