"""What a job has recorded of itself in progress.jsonl (judge.py), and the order of that and of its log. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from dtctl.launch.control.failure import Failure
from dtctl.launch.control.messages import (
    COUNT,
    RANK,
    WORKER,
    WORKERS,
    Check,
    InvalidMessage,
    file_name,
    form,
    integer,
    list_of,
    nullable,
    number,
    prose,
)
from dtctl.launch.control.progress import Standing, standings
from dtctl.slurm import batchlog


@dataclass(frozen=True, slots=True)
class RecordedProgress:
    """How far the worker of the smallest rank is, which stands for all."""

    attempt: int
    worker: Standing


@dataclass(frozen=True, slots=True)
class LeftEarly:
    """All workers of the attempt that have left although their training has steps left."""

    attempt: int
    workers: tuple[Standing, ...]


@dataclass(frozen=True, slots=True)
class Hang:
    """The attempt hangs, and the workers' stacks are being collected."""

    attempt: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why it hangs; its workers are ended."""

    attempt: int
    failure: Failure
    silent_s: float


Recorded: TypeAlias = RecordedProgress | LeftEarly | Hang | Verdict
Event: TypeAlias = Recorded | batchlog.Event

_FAILURE: Final = form(
    node=file_name, rank=nullable(RANK), exit_code=nullable(integer(0, 255)), signal=nullable(integer(1, 64)),
    time=number, summary=prose, tail=list_of(prose, 20),
)  # fmt: skip


def _standing(value: Any) -> Standing:
    checked = form(node=file_name)(value)
    return standings(checked["node"], [WORKER(value)])[0]


_CHECKS: Final[dict[str, Check]] = {
    "progress": form(attempt=COUNT, time=number, worker=_standing),
    "left-early": form(attempt=COUNT, time=number, workers=list_of(_standing, WORKERS)),
    "hang": form(attempt=COUNT, time=number, silent_s=number),
    "verdict": form(attempt=COUNT, time=number, failure=_FAILURE, silent_s=number),
}


def read(line: str) -> tuple[float, Recorded] | None:
    """When something was recorded, in seconds since the epoch, and what; None for a line that is none."""
    try:
        record = json.loads(line)
        op = record["op"]
        facts = _CHECKS[op](record)
    except (ValueError, RecursionError, KeyError, TypeError, InvalidMessage):
        return None
    time, attempt = facts["time"], facts["attempt"]
    if op == "progress":
        return time, RecordedProgress(attempt, facts["worker"])
    if op == "left-early":
        return time, LeftEarly(attempt, tuple(facts["workers"]))
    if op == "hang":
        return time, Hang(attempt, facts["silent_s"])
    failure = Failure(**{**facts["failure"], "tail": tuple(facts["failure"]["tail"]), "hang": True})
    return time, Verdict(attempt, failure, facts["silent_s"])


def in_order(log_lines: Iterable[str], record_lines: Iterable[str], *, now: float) -> list[tuple[float, Event]]:
    """The events in a part of the job's log and of its record, by time.

    Args:
        log_lines: what was read of the log; a line without a time is as old as the next one with a time.
        record_lines: what was read of the record.
        now: the time of what has none, in seconds since the epoch.
    """
    events: list[tuple[float, Event]] = [entry for line in record_lines if (entry := read(line)) is not None]
    logged = [event for line in log_lines for event in batchlog.read(line)]
    return sorted([*events, *_with_times(logged, now)], key=lambda entry: entry[0])


def _with_times(events: Sequence[batchlog.Event], now: float) -> list[tuple[float, batchlog.Event]]:
    timed: list[tuple[float, batchlog.Event]] = []
    moment = now
    for event in reversed(events):
        if isinstance(event, batchlog.Start | batchlog.StepEnded):
            moment = event.time
        timed.append((moment, event))
    return timed[::-1]
