"""Lines of logs without what launchers put before them, and what those prefixes say: rank, node, time. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_DECORATION = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_PREFIXES = tuple(
    re.compile(text)
    for text in (
        r"\[(?P<node>[A-Za-z][\w.-]*):(?:(?P<rank>\d+)|agent)\] ?",  # dtctl: [node1:3]
        r"\[rank(?P<rank>\d+)\]:(?: |$)?",  # torch
        r"\[(?:trainer|default|[a-z_]+)(?P<rank>\d+)(?:\|\d+)?\]:(?: |$)?",  # torchrun --tee: [default3]:
        r"\[\d+,(?P<rank>\d+)\]<std(?:out|err|diag)>: ?",  # mpirun --tag-output
        r" *(?P<rank>\d{1,5}): ?(?=\S|  )",  # srun --label
        r"(?P<node>[a-z][\w.-]*\d[\w.-]*): (?=\[|Traceback|  |(?P=node):|\w+Error)",  # pdsh
        r"\[?(?P<iso>\d{4}-\d\d-\d\d[T_ ]" + _CLOCK + r")(?:Z|[+-]\d\d:?\d\d)?\]?[ |:-]*",
        r"\[[IWEF](?P<date>\d{3,4}) (?P<clock>" + _CLOCK + r") [^\]]*\] ?",  # glog, as torch writes it
        r"[IWEF](?P<date>\d{4}) (?P<clock>" + _CLOCK + r") +[^\]]*\] ?",  # torchrun's own messages
        r"\[[IWEF] [\w.]+:\d+\] ?",  # torch before 2.2
        r"\[(?:PG [^\]]*?)?Rank (?P<rank>\d+)\] ?",
        r"(?P<node>[A-Za-z][\w.-]*):\d+:\d+ \[\d+\] ",  # NCCL: node:pid:thread [gpu]
        r"\[\d+\] (?=\[|NCCL)",  # a line number, or a GPU alone
    )
)
_PATH_RANK = re.compile(r"(?:^|[._/-])rank[-_.]?(\d+)(?=[._/-]|$)")
_TORCHRUN_PATH = re.compile(r"attempt_\d+/(\d+)/std(?:out|err)\.log$")
_DTCTL_PATH = re.compile(r"logs/([^/]+)/(?:rank-\d+|agent)\.log$")
_MONTH_DAYS = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a log."""

    file: str
    number: int
    """From 1."""
    raw: str
    text: str
    """Without prefixes."""
    rank: int | None
    node: str | None
    time: float | None
    """Seconds since the year began, months counted as 31 days: enough to order lines. None where none was printed."""


def parse(raw: str, *, file: str, number: int, rank: int | None, node: str | None) -> Line:
    """A line and what its prefixes say.

    Args:
        raw: as it stands in the file, without its line end.
        file: where.
        number: which line, from 1.
        rank: whose file it is, if the file is one rank's.
        node: whose file it is, if the file is one node's.
    """
    text = _DECORATION.sub("", raw).rsplit("\r", 1)[-1]
    time: float | None = None
    changed = True
    while changed and text:
        changed = False
        for pattern in _PREFIXES:
            found = pattern.match(text)
            if found is None or not found.end():
                continue
            groups = found.groupdict()
            if groups.get("rank") is not None and rank is None:
                rank = int(groups["rank"])
            node = node or groups.get("node")
            if time is None:
                time = _time(groups)
            text = text[found.end() :]
            changed = True
    return Line(file=file, number=number, raw=raw, text=text, rank=rank, node=node, time=time)


def _time(groups: dict[str, str | None]) -> float | None:
    iso, date, clock = groups.get("iso"), groups.get("date"), groups.get("clock")
    if iso is not None:
        month, day, clock = int(iso[5:7]), int(iso[8:10]), iso[11:]
    elif date is not None:  # E1206 and E321 alike: the day has two digits, the month what is left
        month, day = int(date[:-2]), int(date[-2:])
    else:
        return None
    hours, minutes, seconds = (clock or "0:0:0").replace(",", ".").split(":")
    return ((month * _MONTH_DAYS + day) * 24 + int(hours)) * 3600 + int(minutes) * 60 + float(seconds)


def owner_of(path: Path) -> tuple[int | None, str | None]:
    """The rank and the node that a log file belongs to, going by its path."""
    text = path.as_posix()
    node = _DTCTL_PATH.search(text)
    rank = _PATH_RANK.search("/".join(text.split("/")[-2:])) or _TORCHRUN_PATH.search(text)
    return (int(rank[1]) if rank else None, node[1] if node else None)
