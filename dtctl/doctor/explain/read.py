"""From paths to lines: log files, folders of them, and the folders of dtctl's runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtctl import folders, names
from dtctl.doctor.explain.content import COMPRESSED, content
from dtctl.doctor.explain.dumps import is_dump
from dtctl.doctor.explain.found import Source
from dtctl.doctor.explain.lines import owner_of
from dtctl.errors import UsageError
from dtctl.launch.records import validate_records
from dtctl.launch.records.record import PLAN_BYTES

SUFFIXES = (".log", ".out", ".err", ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A file that says less than it should."""

    file: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLayout:
    """What is known of a job apart from its output."""

    node_of: dict[int, str] = field(default_factory=dict)
    """rank -> node"""
    address_of: dict[str, str] = field(default_factory=dict)
    """address -> node"""


def dump_files(paths: Iterable[Path]) -> list[Path]:
    """The flight-recorder dumps that these paths mean, each once, in order."""
    found: dict[Path, None] = {}
    for path in paths:
        inside = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        found.update(dict.fromkeys(file for file in inside if is_dump(file)))
    return list(found)


def log_files(paths: Iterable[Path]) -> list[Path]:
    """The log files that these paths mean, each once, in order; without dumps.

    Raises:
        UsageError: a path does not exist, or a folder holds no logs.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if _is_log(file) and file.is_file())
            if not inside and not dump_files([path]):
                raise UsageError("there are no logs in this folder", where=str(path), hint="name the files themselves")
            found.update(dict.fromkeys(inside))
        elif path.exists():
            found.update({} if is_dump(path) else {path: None})
        else:
            raise UsageError("there is no such file or folder", where=str(path))
    return list(found)


def _is_log(file: Path) -> bool:
    suffix = Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix
    return suffix in SUFFIXES


def layout_of(paths: Iterable[Path]) -> LogLayout:
    """What the plan says, when the paths belong to a run of dtctl."""
    for path in paths:
        for folder in (path, *path.absolute().parents[:3]):
            plan = folder / names.PLAN_FILE
            if plan.is_file():
                return _layout(plan)
    return LogLayout()


def _layout(plan: Path) -> LogLayout:
    try:
        found = json.loads(folders.read_regular(str(plan), PLAN_BYTES))
        nodes: list[dict[str, Any]] = found["nodes"] if validate_records.plan(found) else []
        node_of = {node["first_rank"] + i: node["name"] for node in nodes for i in range(node["slots"])}
        return LogLayout(node_of=node_of, address_of={node["address"]: node["name"] for node in nodes})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return LogLayout()


def read(files: Iterable[Path], unread: list[Unread]) -> Iterator[Source]:
    """The lines of all files; those that could not be read, or not to their end, are added to `unread`.

    Raises:
        UsageError: the system does not let one be read.
    """
    for file in files:
        found = content(file)
        if found.trouble:
            unread.append(Unread(file=str(file), why=found.trouble))
        rank, node = owner_of(file.absolute())
        yield Source(file=str(file), rank=rank, node=node, lines=found.text.split("\n"))
