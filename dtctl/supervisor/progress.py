"""Progress of the workers of a node, read from small files that the workers map into their memory.

A worker maps one file and changes numbers in it (dtctl/runtime/telemetry/progress.py). No code of the worker has to run
when the file is read, so the progress of a stopped, stuck or dead worker is known, too. Stdlib only, Python 3.8.
"""

from __future__ import annotations

import json
import os
import struct
import time

from dtctl import node_facts
from dtctl.supervisor.messages.attempt import ResumeVerdict, WorkerProgress

FIELDS = (
    "pid", "signal", "phase", "step", "place", "noted_ns", "first", "begun_ns", "slowest_ns", "stall_ns",
    "evaluation_ns", "saved", "until", "committed",
)  # fmt: skip
RECORD = struct.Struct(f"@8s{len(FIELDS)}Q")
MAGIC = b"dtctl-p3"
RESUME_SUFFIX = ".resume"
"""Suffix of a JSON file next to the progress file, in which the first worker reports its resume."""


def read_worker_progress(folder: str) -> list[WorkerProgress]:
    """Return the newest progress of each worker that reports it, in no particular order."""
    try:
        file_names = os.listdir(folder)
    except OSError:
        return []
    resumed = {name[: -len(RESUME_SUFFIX)] for name in file_names if name.endswith(RESUME_SUFFIX)}
    reports = []
    for name in file_names:
        if name.startswith("rank-") and name[5:].isdigit():
            try:
                with open(os.path.join(folder, name), "rb") as file:
                    data = file.read(RECORD.size)
            except OSError:
                continue
            if len(data) == RECORD.size and data[:8] == MAGIC:
                told = read_resume(os.path.join(folder, name + RESUME_SUFFIX)) if name in resumed else {}
                reports.append(build_worker_progress(int(name[5:]), RECORD.unpack(data)[1:], time.monotonic_ns(), told))
    return reports


def read_resume(path: str) -> dict[str, ResumeVerdict]:
    """Return a worker's verdicts on a resume; empty if a worker cannot have written the file."""
    try:
        with open(path, "rb") as file:
            told = json.loads(file.read(1 << 20))
        return {name: ResumeVerdict.parse(told[name]) for name in ("resumed", "confirmed") if name in told}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def build_worker_progress(
    rank: int, numbers: tuple[int, ...], now_ns: int, told: dict[str, ResumeVerdict]
) -> WorkerProgress:
    """Return a worker's progress for the control machine, with times as ages in seconds, since clocks differ."""
    record = dict(zip(FIELDS, numbers))  # noqa: B905 - `strict` is newer than Python 3.8
    return WorkerProgress(
        rank=rank,
        pid=record["pid"],
        signal=record["signal"],
        phase=record["phase"],
        step=record["step"],
        place=record["place"],
        first=record["first"],
        saved=record["saved"],
        until=record["until"],
        committed=record["committed"],
        begun_s=max(0, now_ns - record["begun_ns"]) / 1e9,
        stale_s=max(0, now_ns - record["noted_ns"]) / 1e9,
        slowest_s=record["slowest_ns"] / 1e9,
        stall_s=record["stall_ns"] / 1e9,
        evaluation_s=record["evaluation_ns"] / 1e9,
        state=node_facts.read_process_state(record["pid"]),
        **told,
    )
