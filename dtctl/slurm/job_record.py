"""Records of a job about itself in progress.jsonl (judge.py), and the order of that and of its log. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from dtctl.launch.control.failure import Failure
from dtctl.launch.control.progress import Standing, standings
from dtctl.schema import Record, file_name, list_of, nullable, number, prose, value
from dtctl.slurm import batchlog
from dtctl.supervisor.messages.attempt import SIGNAL, WorkerProgress
from dtctl.supervisor.messages.base import COUNT, EXIT_CODE, RANK, WORKERS, Message


def _standing(document: Any) -> Standing:
    worker = WorkerProgress.parse(document)
    return standings(file_name(document.get("node")), [worker])[0]


class _RecordedFailure(Record):
    node: str = value(file_name)
    rank: int | None = value(nullable(RANK))
    exit_code: int | None = value(nullable(EXIT_CODE))
    signal: int | None = value(SIGNAL)
    time: float = value(number)
    summary: str = value(prose)
    tail: list[str] = value(list_of(prose, 20))


def _hang_failure(document: Any) -> Failure:
    recorded = vars(_RecordedFailure.parse(document))
    return Failure(**{**recorded, "tail": tuple(recorded["tail"]), "hang": True})


class Recorded(Message):
    """One line; `time` is in seconds since the epoch."""

    attempt: int = value(COUNT)
    time: float = value(number)


class RecordedProgress(Recorded):
    """Progress of the worker of the smallest rank, which stands for all."""

    op = "progress"
    worker: Standing = value(_standing)


class LeftEarly(Recorded):
    """All workers of the attempt that have left although their training has steps left."""

    op = "left-early"
    workers: list[Standing] = value(list_of(_standing, WORKERS))


class Hang(Recorded):
    """The attempt hangs, and the workers' stacks are being collected."""

    op = "hang"
    silent_s: float = value(number)


class Verdict(Recorded):
    """Cause of a hang; the workers of that attempt are ended."""

    op = "verdict"
    failure: Failure = value(_hang_failure)
    silent_s: float = value(number)


Event: TypeAlias = Recorded | batchlog.Event
_KINDS: Final[Mapping[str, type[Recorded]]] = {kind.op: kind for kind in Recorded.__subclasses__()}


def read(line: str) -> Recorded | None:
    """Return what was recorded; None for a line that is none."""
    try:
        document = json.loads(line)
        return _KINDS[document["op"]].parse(document)
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def in_order(log_lines: Iterable[str], record_lines: Iterable[str], *, now: float) -> list[tuple[float, Event]]:
    """Return the events in a part of the job's log and of its record, by time.

    Args:
        log_lines: what was read of the log; a line without a time is as old as the next one with a time.
        record_lines: what was read of the record.
        now: the time of what has none, in seconds since the epoch.
    """
    recorded = [event for line in record_lines if (event := read(line)) is not None]
    logged = [event for line in log_lines for event in batchlog.read(line)]
    return sorted([*((event.time, event) for event in recorded), *_with_times(logged, now)], key=lambda entry: entry[0])


def _with_times(events: Sequence[batchlog.Event], now: float) -> list[tuple[float, batchlog.Event]]:
    timed: list[tuple[float, batchlog.Event]] = []
    moment = now
    for event in reversed(events):
        if isinstance(event, batchlog.Start | batchlog.StepEnded):
            moment = event.time
        timed.append((moment, event))
    return timed[::-1]
