"""The events in a job's own log: lines of the batch script and of srun. Pure."""

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
class Begun:
    """The batch script has begun, for the first time or again."""


@dataclass(frozen=True, slots=True)
class Start:
    """The workers are started."""

    attempt: int
    time: float
    """Seconds since the epoch, by the first node's clock."""
    nodes: tuple[str, ...]
    rendezvous: str
    """Address and port."""


@dataclass(frozen=True, slots=True)
class StepEnded:
    """All tasks of a start have ended."""

    attempt: int
    time: float
    exit_code: int
    """0: each with success."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A task has failed, or a node."""

    node: str
    task: int | None
    """Number of the task in the job step; None: the node is lost."""
    exit_code: int | None
    """Exit code of the shell."""
    signal: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Aborted:
    """A task has failed, and srun ends the others: first with SIGTERM, then with SIGKILL."""


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Slurm ended the job, or dtctl's script requeued it, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Requeued:
    """The batch script has Slurm start the job again."""


@dataclass(frozen=True, slots=True)
class ScriptEnded:
    """The batch script has exited by itself and is not to be requeued."""

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


Event: TypeAlias = Begun | Start | StepEnded | Ended | Aborted | TakenBack | Requeued | ScriptEnded

_BEGINNINGS: Final[Sequence[tuple[str, Callable[[str], Event]]]] = (
    ("dtctl: job ", lambda _: Begun()),
    ("dtctl: to be started again, ", lambda _: Requeued()),
    ("dtctl: the time is nearly over", lambda _: TakenBack("its time limit was near")),
    ("dtctl: a node was lost, and no other one is left", lambda _: TakenBack("a node failed")),
)
"""Beginnings of lines of the batch script; the rest of a line may be a reason."""


def read_events(lines: Iterable[str], *, now: float) -> list[tuple[float, Event]]:
    """Return the events of a part of a job's log, each with its time in seconds since the epoch.

    Args:
        lines: of the log.
        now: the time of what neither has a time nor stands before what has one.
    """
    timed: list[tuple[float, Event]] = []
    moment = now
    for event in reversed([event for line in lines for event in read(line)]):
        if isinstance(event, Start | StepEnded):
            moment = event.time
        timed.append((moment, event))
    return timed[::-1]


def read(line: str) -> Sequence[Event]:
    """Return what one line means; nothing for most.

    Source of srun's texts: src/srun/libsrun/launch.c and task_state.c of Slurm 22.05.
    """
    if (match := _START.match(line)) and (moment := _moment(match[4])) is not None:
        return [Start(int(match[1]), moment, _nodes(match[2]), match[3])]
    if (match := _STEP_OVER.match(line)) and (moment := _moment(match[3])) is not None:
        return [StepEnded(int(match[1]), moment, int(match[2]))]
    if match := _OVER.match(line):
        return [ScriptEnded(int(match[1]))]
    if _ABORTED.match(line):
        return [Aborted()]
    for beginning, event in _BEGINNINGS:
        if line.startswith(beginning):
            return [event(line.removeprefix(beginning))]
    if match := _TASK.match(line):
        code, number, reason = _exit_of(match[3])
        return [Ended(match[1], task, code, number, reason) for task in _numbers(match[2])]
    if match := _NODE.match(line):
        return [Ended(match[1], None, None, None)]
    if match := _DUE.search(line):
        reasons = {
            "TIME LIMIT": "its time limit was reached",
            "PREEMPTION": "it was preempted",
            "NODE FAILURE": "a node failed",
            "JOB REQUEUE": "it was requeued (scontrol requeue)",
        }
        return [TakenBack(reasons.get(match[1], match[1].lower()))]
    return []


def _nodes(text: str) -> tuple[str, ...]:
    """Return the nodes of `node[1-2]`; none where it is no list of nodes."""
    try:
        nodes = nodeset.expand(text)
    except SpecError:
        return ()
    return tuple(nodes) if all(map(folders.is_name, nodes)) else ()


def _moment(text: str) -> float | None:
    """Return seconds since the epoch of `2026-11-22T11:40:03.250Z`, as `date -u` of the batch file writes it."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def _exit_of(text: str) -> tuple[int | None, int | None, str]:
    """Return exit code, signal and reason in srun's message about a task."""
    if match := _CODE.match(text):
        code = int(match[1])
        # Slurm reports the exit code of bash, which is 128 + N where a signal ended the program.
        return code, code - 128 if code > 128 else None, ""
    if text.startswith("Out Of Memory"):
        return 137, 9, "it used more memory than the job requested"
    number = _SIGNALS.get(text.removesuffix(" (core dumped)").strip())
    return (128 + number, number, "") if number else (1, None, text.strip())


def _numbers(text: str) -> list[int]:
    """`0-2,5` as numbers."""
    numbers: list[int] = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
