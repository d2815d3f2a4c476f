"""Events in a job's own log, from lines of the batch script and of srun. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final, TypeAlias

from dtctl import folders
from dtctl.errors import SpecError
from dtctl.spec import nodeset


@dataclass(frozen=True, slots=True)
class BatchScriptStarted:
    """Event: the batch script has begun, for the first time or again."""


@dataclass(frozen=True, slots=True)
class WorkersStarted:
    """Event: the batch script has started the workers."""

    attempt: int
    time: float
    """Time in seconds since the epoch, by the clock of the first node."""
    nodes: tuple[str, ...]
    rendezvous: str
    """Address and port of the rendezvous."""


@dataclass(frozen=True, slots=True)
class JobStepEnded:
    """Event: all tasks of an attempt have ended."""

    attempt: int
    time: float
    exit_code: int
    """Exit code of the job step; 0 if each task succeeded."""


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """Event: a task or a node has failed."""

    node: str
    task: int | None
    """Number of the task in the job step; None if the node was lost."""
    exit_code: int | None
    """Exit code of the task's shell."""
    signal: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TasksAborted:
    """Event: a task has failed, and srun ends the others with SIGTERM, then with SIGKILL."""


@dataclass(frozen=True, slots=True)
class JobTerminated:
    """Event: Slurm has ended the job, or dtctl's script has requeued it."""

    reason: str


@dataclass(frozen=True, slots=True)
class JobRequeued:
    """Event: the batch script requests a requeue from Slurm."""


@dataclass(frozen=True, slots=True)
class BatchScriptEnded:
    """Event: the batch script has exited by itself and will not be requeued."""

    exit_code: int


_START: Final = re.compile(r"dtctl: run \S+, start (\d+) on (\S+), rendezvous (\S+:\d+), (\S+)$")
_STEP_OVER: Final = re.compile(r"dtctl: start (\d+) is over with exit code (\d+), (\S+)$")
_OVER: Final = re.compile(r"dtctl: ended with exit code (\d+)(?:, \S+)?$")
_ABORTED: Final = re.compile(
    r"srun: (?:Job step aborted|(?:launch/slurm: \w+: )?Terminating (?:StepId|job step)|First task exited)"
)
_TASK: Final = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
_NODE: Final = re.compile(r"srun: error: Node failure on (\S+)")
_CODE: Final = re.compile(r"Exited with exit code (\d+)")
_DUE: Final = re.compile(r"\*\*\* (?:JOB|STEP) .* DUE TO ([A-Z ]+?)(?:, [^*]*)? \*\*\*")
_SIGNALS: Final = {signal.strsignal(number): number for number in signal.valid_signals()}


Event: TypeAlias = (
    BatchScriptStarted
    | WorkersStarted
    | JobStepEnded
    | TaskFailed
    | TasksAborted
    | JobTerminated
    | JobRequeued
    | BatchScriptEnded
)

_BEGINNINGS: Final[Sequence[tuple[str, Callable[[str], Event]]]] = (
    ("dtctl: job ", lambda _: BatchScriptStarted()),
    ("dtctl: to be started again, ", lambda _: JobRequeued()),
    ("dtctl: the time is nearly over", lambda _: JobTerminated("its time limit was near")),
    ("dtctl: a node was lost, and no other one is left", lambda _: JobTerminated("a node failed")),
)
"""Beginnings of lines of the batch script; the rest of such a line may have a reason."""


def read_events(lines: Iterable[str], *, now: float) -> list[tuple[float, Event]]:
    """Return the events of a part of a job's log, each with its time in seconds since the epoch.

    Args:
        lines: lines of the log.
        now: time of events that have no time and are not followed by one that has a time.
    """
    timed: list[tuple[float, Event]] = []
    moment = now
    for event in reversed([event for line in lines for event in parse_batch_line(line)]):
        if isinstance(event, WorkersStarted | JobStepEnded):
            moment = event.time
        timed.append((moment, event))
    return timed[::-1]


def parse_batch_line(line: str) -> Sequence[Event]:
    """Return the events of one line; most lines have none.

    Source of srun's texts: src/srun/libsrun/launch.c and task_state.c of Slurm 22.05.
    """
    if (match := _START.match(line)) and (moment := _parse_utc_time(match[4])) is not None:
        return [WorkersStarted(int(match[1]), moment, _expand_node_list(match[2]), match[3])]
    if (match := _STEP_OVER.match(line)) and (moment := _parse_utc_time(match[3])) is not None:
        return [JobStepEnded(int(match[1]), moment, int(match[2]))]
    if match := _OVER.match(line):
        return [BatchScriptEnded(int(match[1]))]
    if _ABORTED.match(line):
        return [TasksAborted()]
    for beginning, event in _BEGINNINGS:
        if line.startswith(beginning):
            return [event(line.removeprefix(beginning))]
    if match := _TASK.match(line):
        code, number, reason = _parse_task_exit(match[3])
        return [TaskFailed(match[1], task, code, number, reason) for task in _parse_number_list(match[2])]
    if match := _NODE.match(line):
        return [TaskFailed(match[1], None, None, None)]
    if match := _DUE.search(line):
        reasons = {
            "TIME LIMIT": "its time limit was reached",
            "PREEMPTION": "it was preempted",
            "NODE FAILURE": "a node failed",
            "JOB REQUEUE": "it was requeued (scontrol requeue)",
        }
        return [JobTerminated(reasons.get(match[1], match[1].lower()))]
    return []


def _expand_node_list(text: str) -> tuple[str, ...]:
    """Return the nodes of a list such as `node[1-2]`; empty if the text is not a list of nodes."""
    try:
        nodes = nodeset.expand_nodeset(text)
    except SpecError:
        return ()
    return tuple(nodes) if all(map(folders.is_name, nodes)) else ()


def _parse_utc_time(text: str) -> float | None:
    """Return the seconds since the epoch of `2026-11-22T11:40:03.250Z`, the format of `date -u` in the batch file."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def _parse_task_exit(text: str) -> tuple[int | None, int | None, str]:
    """Return exit code, signal and reason from srun's message about a task."""
    if match := _CODE.match(text):
        code = int(match[1])
        # Slurm reports the exit code of bash, which is 128 + N if signal N ended the program.
        return code, code - 128 if code > 128 else None, ""
    if text.startswith("Out Of Memory"):
        return 137, 9, "it used more memory than the job requested"
    number = _SIGNALS.get(text.removesuffix(" (core dumped)").strip())
    return (128 + number, number, "") if number else (1, None, text.strip())


def _parse_number_list(text: str) -> list[int]:
    """Return the numbers of a list such as `0-2,5`."""
    numbers: list[int] = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
