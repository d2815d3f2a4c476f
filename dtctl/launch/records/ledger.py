"""Ledger of a run's time: each moment belongs to exactly one phase, so the phases add up to the wall time.

The launcher's own phases follow from what it does. While the job runs, its workers report progress (progress.py), and
time is moved from one phase to another as more is known: waits for a snapshot from `useful` to `stall`, and the steps
that the next attempt has to do again from `useful` to `lost`. Moving changes no sum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from dtctl import folders
from dtctl.launch.control.progress import ReportedPhase, Standing
from dtctl.launch.records.record import RUN_BYTES
from dtctl.launch.records.run_writer import write_private
from dtctl.schema import Record, list_of, mapping_of, nullable, number, pair, text, value
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
    """Time of a run by phase, as in ledger.json. Versions of dtctl differ in the keys that they write."""

    wall_s: float = value(number, default=0.0)
    attempts: int | None = value(nullable(COUNT), default=None)
    phases_s: dict[str, float] = value(mapping_of(text(40), number, 100), default={})
    goodput: float | None = value(nullable(number), default=None)
    """Share of `wall_s` that was spent on steps which count; None when the job reports no steps."""
    steps: int | None = value(nullable(COUNT), default=None)
    steps_lost: int | None = value(nullable(COUNT), default=None)
    phase: str = value(text(40), default="")
    """The current phase."""
    copied_bytes: int = value(COUNT, default=0)
    """Bytes of checkpoints that were copied between nodes while workers ran (job.shared)."""
    copied_s: float = value(number, default=0.0)
    """Seconds that these copies took, which are no phase: training continued."""
    counted_s: dict[str, float] = value(mapping_of(text(40), number, 100), default={})
    """Seconds that were moved to phases in the current attempt, or the last one."""
    course: list[tuple[str, float]] = value(list_of(pair(text(40), number)), default=[])
    """Phase after phase, and when each began, in seconds since the beginning."""

    def extend(self, phase: str, wall_s: float) -> LedgerFacts:
        """Return the facts of a run of `wall_s` seconds, in which what is not counted here belongs to a phase."""
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


class Ledger:
    """A stopwatch with one running phase."""

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
            clock: monotonic, in seconds.
            begun: when the run began, on that clock. None: now.
            phase: what time belongs to from then on.
            path: file that is kept up to date. None: none is, but by `write`.
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
        """Bytes that were copied between nodes while workers ran, and the seconds that it took."""
        self._newest_progress: Standing | None = None
        """Newest progress of the worker that counts, in the current attempt or the last one."""
        self._attempt_runs = False
        """True if that attempt is still on."""
        self._moved_s = {"stall": 0.0, "evaluation": 0.0}
        """Seconds of this attempt that have been moved to these phases."""
        self._marks: list[tuple[int, float]] = []
        """Steps done and seconds of `useful` spent by then, in this attempt."""
        self._run_begun = self.begun
        self._last_write = self.begun
        self._course: list[tuple[str, float]] = [(phase, 0.0)]
        """Phase and second from which on it was; what was moved is not in it, but for what is known to be of one
        piece."""

    def enter(self, phase: str) -> None:
        """Count the time from now on to `phase`."""
        now = self._clock()
        self.spent[self.phase] += now - self._phase_start
        self.phase, self._phase_start = phase, now
        self.mark(phase, now)

    def mark(self, phase: str, since: float) -> None:
        """Record in the course that `phase` has lasted since then, by the clock; drop other entries for that time."""
        at_s = since - self.begun
        while len(self._course) > 1 and self._course[-1][1] >= at_s:
            self._course.pop()
        if self._course[-1][0] != phase:
            self._course.append((phase, at_s))
        if len(self._course) > MAX_COURSE:
            del self._course[1]

    def move(self, source: str, target: str, seconds: float) -> None:
        """So much of what was counted to `source` belongs to `target`; no more than there is."""
        self.enter(self.phase)
        seconds = min(max(0.0, seconds), self.spent[source])
        self.spent[source] -= seconds
        self.spent[target] += seconds

    def total_s(self) -> float:
        """Return seconds since the beginning."""
        return self._clock() - self.begun

    # -- reports of the workers -------------------------------------------------------------------------------------

    def watch(self, workers: Sequence[Standing]) -> None:
        """Record how far the workers are; the smallest rank stands for all."""
        worker = min(workers, key=lambda worker: worker.rank)
        newest = self._newest_progress
        if worker.phase == ReportedPhase.STARTING or (
            self._attempt_runs and newest is not None and worker.rank > newest.rank
        ):
            return
        if not self._attempt_runs:
            self._begin(worker)
        elif newest is not None and worker.first != newest.first:  # it went back to a snapshot by itself
            self._lose(worker.first)
            self._marks = [(worker.first, self.spent["useful"])]
        if newest is not None and newest.rank == worker.rank and newest.pid != worker.pid:
            self._moved_s = dict.fromkeys(self._moved_s, 0.0)  # its replacement counts from the beginning
        self.enter(self.phase)
        for name, seconds in (("stall", worker.stall_s), ("evaluation", worker.evaluation_s)):
            self.move("useful", name, seconds - self._moved_s[name])
            self._moved_s[name] = max(self._moved_s[name], seconds)
        self._marks.append((worker.step, self.spent["useful"]))
        if len(self._marks) > MAX_MARKS:
            del self._marks[1:-1:2]
        self._newest_progress = worker
        if worker.phase == ReportedPhase.ENDING and self.phase == "useful":
            self.enter("stop")  # no more steps; what the program does now is its own affair
        if self.path is not None and self._clock() - self._last_write >= WRITE_S:
            self.write(self.path, attempts=self.attempts)

    def _begin(self, worker: Standing) -> None:
        """The first steps of an attempt are seen: what went before was its start, and what it repeats was lost."""
        self._lose(worker.first)
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

    def started(self) -> None:
        """Record that the processes of an attempt run; they may never report any progress."""
        self._attempt_runs = False
        self.enter("run")
        self._run_begun = self._phase_start

    def lost(self, detect_s: float) -> None:
        """A worker was lost so long ago, and is replaced from now on."""
        phase = self.phase
        self.enter("heal")
        self.move(phase, "detect", detect_s)
        if detect_s:
            self.mark("detect", self._clock() - detect_s)
            self.mark("heal", self._clock())

    def ended(self, *, failed_s: float = 0.0, hung_s: float = 0.0) -> None:
        """An attempt is over.

        Args:
            failed_s: how long ago it had failed; since then it was being ended.
            hung_s: for how long nothing had moved before that, if it was ended because it hung.
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
        elif phase == "run" and self._newest_progress is not None:  # it has never come to its first step
            self.move("run", "start", self._clock() - self._run_begun)
            self.mark("start", self._run_begun)
            self.mark("stop", self._clock())
        self._attempt_runs = False

    def close(self, *, succeeded: bool) -> None:
        """No attempt follows: what was done since the last snapshot is lost, unless the run has come to its end."""
        if not succeeded and self._newest_progress is not None:
            self._lose(self._newest_progress.saved)

    def _lose(self, saved_step: int) -> None:
        """The steps of the last attempt after step `kept` are done again, or gone."""
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
        """Return what is known so far."""
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
        """Record what was spent so far; whole or not at all.

        Raises:
            LaunchError: it cannot be written.
        """
        self.attempts = attempts
        self._last_write = self._clock()
        write_private(path, json.dumps(vars(self.facts())) + "\n")

    def resume(self, path: Path) -> None:
        """Continue the ledger that another launcher has written before it was killed.

        The job continued without one, so the time since then counts as its phase. Time that its workers have counted
        since then is moved as soon as they report it.
        """
        try:
            facts = LedgerFacts.parse(json.loads(folders.read_regular(str(path), RUN_BYTES)))
            spent = {phase: facts.phases_s.get(phase, 0.0) for phase in PHASES}
            moved_s = {name: facts.counted_s[name] for name in self._moved_s}
        except (OSError, ValueError, KeyError, RecursionError):
            return  # there is none, or an older version has written it: all of it counts as the running phase
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
    """Return the seconds at which a step was done, between the marks around it as if all steps took the same time."""
    previous = marks[0]
    for mark in marks:
        if mark[0] > step:
            if previous[0] > step:
                return previous[1]
            share = (step - previous[0]) / (mark[0] - previous[0])
            return previous[1] + share * (mark[1] - previous[1])
        previous = mark
    return previous[1]
