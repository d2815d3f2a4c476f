"""Reading of paths: log files, folders of log files, and folders of dtctl's runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dtctl import folders, names
from dtctl.doctor.explain.content import COMPRESSED, read_log_content
from dtctl.doctor.explain.dumps import is_dump
from dtctl.doctor.explain.lines import parse_log_owner
from dtctl.doctor.explain.log_findings import LogSource
from dtctl.errors import UsageError
from dtctl.launch.records import validate_records
from dtctl.launch.records.events import AttemptStarting, RunEnded, RunStopping, WorkerExited, parse_event
from dtctl.launch.records.record import PLAN_BYTES

_Key = TypeVar("_Key", int, str)
SUFFIXES = (".log", ".out", ".err", ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadFile:
    """File that could not be read completely, or folder without files."""

    file: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNodeMap:
    """Facts about a job that are known without its output."""

    node_of: dict[int, str] = field(default_factory=dict)
    """Rank -> its node."""
    address_of: dict[str, str] = field(default_factory=dict)
    """Address -> its node."""
    hosts: dict[str, str] = field(default_factory=dict)
    """Node -> its host name, if known."""


def dump_files(paths: Iterable[Path]) -> list[Path]:
    """Return the flight-recorder dumps at these paths in order, without repetitions."""
    found: dict[Path, None] = {}
    for path in paths:
        inside = _files_in(path) if path.is_dir() else [path]
        found.update(dict.fromkeys(file for file in inside if is_dump(file)))
    return list(found)


def log_files(paths: Sequence[Path], unread: list[UnreadFile]) -> list[Path]:
    """Return the log files at these paths in order, without repetitions and dumps.

    Folders without log files are added to `unread`.

    Raises:
        UsageError: a path does not exist, or all paths are folders without logs.
    """
    found: dict[Path, None] = {}
    empty: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [file for file in _files_in(path) if _is_log(file)]
            if not inside and not dump_files([path]) and _record_of(path) is None:
                empty.append(path)
            found.update(dict.fromkeys(inside))
        elif path.exists():
            found.update({} if is_dump(path) else {path: None})
        else:
            raise UsageError("there is no such file or folder", where=str(path))
    if empty and len(empty) == len(paths):
        what = "there are no logs in this folder" if len(empty) == 1 else "there are no logs in these folders"
        raise UsageError(what, where=", ".join(map(str, empty)), hint="name the files themselves")
    unread += [UnreadFile(file=str(path), why="there are no logs in this folder") for path in empty]
    return list(found)


def _files_in(folder: Path) -> list[Path]:
    """Return the regular files of a folder and its subfolders, without links to nothing or with invalid names."""
    found = (Path(inside, name) for inside, _, names in os.walk(folder) for name in names)
    return sorted(file for file in found if os.path.isfile(file))  # noqa: PTH113  # is_file() fails at such a link


def _is_log(file: Path) -> bool:
    suffix = Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix
    return suffix in SUFFIXES


def read_job_node_map(paths: Iterable[Path]) -> JobNodeMap:
    """Return the facts in the plans of the paths' dtctl runs, without facts on which several plans disagree."""
    plans = dict.fromkeys(plan for path in paths if (plan := _plan_of(path)) is not None)
    layouts = [_read_log_layout(plan) for plan in plans]
    return JobNodeMap(
        node_of=_merge_agreed_entries([layout.node_of for layout in layouts]),
        address_of=_merge_agreed_entries([layout.address_of for layout in layouts]),
        hosts=_merge_agreed_entries([layout.hosts for layout in layouts]),
    )


def read_run_records(paths: Iterable[Path]) -> Iterator[LogSource]:
    """Yield, for each folder of a dtctl run among the paths, the launcher's lines about the newest attempt.

    A worker that was killed has printed nothing about it: its exit code is in the run's record alone.
    """
    for record in dict.fromkeys(found for path in paths if path.is_dir() and (found := _record_of(path)) is not None):
        lines = _describe_newest_attempt(read_log_content(record).text.split("\n"))
        yield LogSource(file=str(record), rank=None, node=None, lines=lines)


def _describe_newest_attempt(record: Sequence[str]) -> list[str]:
    """Return the failures of the newest attempt in words, each at the line of its event; other lines are empty."""
    lines = [""] * len(record)
    for number, event in enumerate(map(parse_event, record)):
        match event:
            case AttemptStarting():
                lines[:number] = [""] * number
            case WorkerExited() if event.exit_code:
                lines[number] = event.event_text
            case RunStopping():
                lines[number] = event.event_text
            case RunEnded() if event.status == "failed" and event.first_failure is not None:
                lines[number] = event.first_failure.event_text
            case RunEnded() if event.status == "failed":
                lines[number] = f"error: the run failed: {event.error or 'no reason is recorded'}"
    return lines


def read_run_end(paths: Sequence[Path]) -> tuple[RunEnded, Path, int] | None:
    """Return the end of the run that all paths belong to, with its record's file and line; None if there is none."""
    records = {_record_of(path) if path.is_dir() else None for path in paths}
    record = records.pop() if len(records) == 1 else None
    if record is None:
        return None
    ends = [
        (event, record, number)
        for number, line in enumerate(read_log_content(record).text.split("\n"), 1)
        if isinstance(event := parse_event(line), RunEnded)
    ]
    return ends[-1] if ends else None


def _plan_of(path: Path) -> Path | None:
    return _find_run_file(path, names.PLAN_FILE)


def _record_of(path: Path) -> Path | None:
    return _find_run_file(path, names.EVENTS_FILE)


def _find_run_file(path: Path, name: str) -> Path | None:
    """Return a file of the dtctl run that the path belongs to; None if it belongs to none."""
    path = path.absolute()
    return next((file for folder in (path, *path.parents[:3]) if (file := folder / name).is_file()), None)


def _merge_agreed_entries(tables: Sequence[dict[_Key, str]]) -> dict[_Key, str]:
    """Return the entries of several tables that no other table contradicts."""
    said: dict[_Key, set[str]] = {}
    for table in tables:
        for key, value in table.items():
            said.setdefault(key, set()).add(value)
    return {key: values.pop() for key, values in said.items() if len(values) == 1}


def _read_log_layout(plan: Path) -> JobNodeMap:
    try:
        found = json.loads(folders.read_regular(str(plan), PLAN_BYTES))
        nodes: list[dict[str, Any]] = validate_records.PLAN(found)["nodes"]
        node_of = {node["first_rank"] + i: node["name"] for node in nodes for i in range(node["slots"])}
        return JobNodeMap(
            node_of=node_of,
            address_of={node["address"]: node["name"] for node in nodes},
            hosts={node["name"]: node["host"] for node in nodes if node.get("host")},
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return JobNodeMap()


def read_log_sources(files: Iterable[Path], unread: list[UnreadFile]) -> Iterator[LogSource]:
    """Yield the lines of all files; files that could not be read completely are added to `unread`.

    Raises:
        UsageError: the system does not allow to read a file.
    """
    for file in files:
        found = read_log_content(file)
        if found.trouble:
            unread.append(UnreadFile(file=str(file), why=found.trouble))
        rank, node = parse_log_owner(file.absolute())
        yield LogSource(file=str(file), rank=rank, node=node, lines=found.text.split("\n"))
