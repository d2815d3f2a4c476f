"""Hostfiles of MPI and DeepSpeed: `name slots=4`, one node per line. Pure except for reading the file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dtctl import folders
from dtctl.errors import SpecError

_SLOTS_OF_MPICH = re.compile(r"(?P<name>[^:\[\]]+):(?P<slots>[^:]*)\Z")
_COUNT = re.compile(r"[1-9][0-9]{0,8}\Z")
MAX_BYTES = 4 << 20
_USUAL = "write `name slots=4`"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostfileLine:
    """Entry of a hostfile: a node and its slots."""

    name: str
    slots: int | None
    """Number of workers on the node; None if the line has no number."""
    where: str
    """Place of the line, for errors: `file:line`."""


def parse_hostfile(text: str, *, source: str) -> list[HostfileLine]:
    """Return the nodes, in the order of the file.

    Accepts `name slots=4 max_slots=8` (Open MPI, DeepSpeed) and `name:4` (MPICH); `#` begins a comment. `max_slots` is
    checked and then ignored: dtctl never starts more workers than `slots`.

    Raises:
        SpecError: a line has another form, a name is listed twice, or the file has no node.
    """
    entries: dict[str, HostfileLine] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        node = _parse_hostfile_line(words, f"{source}:{number}")
        if node.name in entries:
            raise SpecError(
                f"node {node.name} is listed twice in the hostfile: {entries[node.name].where} and {node.where}",
                where=node.where,
                hint="add up its slots in one line",
            )
        entries[node.name] = node
    if not entries:
        raise SpecError("the hostfile names no node", where=source, hint="write one `name slots=4` a line")
    return list(entries.values())


def _parse_hostfile_line(words: list[str], where: str) -> HostfileLine:
    name, counts = words[0], dict[str, int]()
    mpich = _SLOTS_OF_MPICH.match(name)
    if mpich is not None:
        name = mpich["name"]
        counts["slots"] = _parse_worker_count("slots", mpich["slots"], where)
    elif "=" in name:
        raise SpecError(f"{name!r} is not the name of a node", where=where, hint=_USUAL)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if not equals or key not in ("slots", "max_slots"):
            raise SpecError(f"{word!r} is not understood in a hostfile", where=where, hint=_USUAL)
        if key in counts:
            raise SpecError(f"{key} of node {name} are given twice", where=where, hint=_USUAL)
        counts[key] = _parse_worker_count(key, value, where)
    slots = counts.get("slots")
    if slots is not None and slots > counts.get("max_slots", slots):
        raise SpecError(f"node {name} has {slots} slots and at most {counts['max_slots']}", where=where)
    return HostfileLine(name=name, slots=slots, where=where)


def _parse_worker_count(key: str, text: str, where: str) -> int:
    if not _COUNT.match(text):
        raise SpecError(f"{key}={text} is not a number of workers", where=where, hint=f"write `{key}=4`")
    return int(text)


def read_hostfile(path: Path) -> list[HostfileLine]:
    """Return the nodes of the hostfile at `path`.

    Raises:
        SpecError: the file cannot be read, or is wrong; a missing file is never treated as an empty one.
    """
    try:
        text = folders.read_regular(str(path), MAX_BYTES).decode("utf-8-sig")
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise SpecError(f"the hostfile cannot be read: {reason}", where=str(path), key="cluster.hostfile") from exc
    except UnicodeDecodeError as exc:
        raise SpecError("the hostfile is not UTF-8 text", where=str(path), key="cluster.hostfile") from exc
    return parse_hostfile(text, source=str(path))
