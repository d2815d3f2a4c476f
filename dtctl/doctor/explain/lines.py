"""Log lines without the prefixes of launchers, and the facts in those prefixes: rank, node, time. Pure."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from pathlib import Path

LONGEST = 10_000
"""Largest number of characters of a line that are read."""
_DECORATION = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x9b[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\^_=>78c]?"
)
_UNSHOWN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""Pattern of characters that a terminal interprets instead of showing them, except for tabs."""
_BAR = re.compile(r"^.*\[\d[\d:]*(?:<[\d:?]+)?, +[^\[\]]*(?:/s|s/\w+)[^\[\]]*\]\s*(?=\S)")
"""Pattern of a progress bar without a line end, after which a process has printed something else in the same line."""
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_ISO = r"\[?(?P<iso>\d{4}[-/]\d\d[-/]\d\d[T_ ]" + _CLOCK + r")(?:Z|[+-]\d\d:?\d\d)?\]?[ |:-]*"
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_STARTS = (
    r"(?=\[|Traceback|  |[A-Z]\w*Error|During handling|The above|20\d\d-|[IWEF]\d{4} |File |NCCL |"
    r"RuntimeError|\w+\.\w+\.?\w*Error)"
)
"""Patterns of a program's first words after the name in a launcher's prefix."""
_STAMP = r"(?:\d{4})?(?P<date>\d{4}) (?P<clock>" + _CLOCK + r")(?: +(?P<pid>\d+)(?= ))?"
"""Pattern of the date, with or without a year, the time and the process or thread, in the form of glog, absl and
torch."""
_LINE_OF = r"(?:\w[\w.-]*\.(?:pyx?|c|cc|cpp|cu|h|hpp|rs|go)|NOTSET|DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL|root)"
"""Pattern of words before a line number in loggers' prefixes; no machine has such a name."""
_BRACKETS = (
    r"\[rank(?P<rank>\d+)\]:(?: |$)?",  # torch
    r"\[(?P<node>\w[\w.-]*):(?P<pid>\d{5,})\] ",  # Open MPI: [node1:01234]
    r"\[\d{10}\.\d+\] ",  # UCX
    r"\[(?P<node>\w[\w.-]*):(?P<pid>\d+) *(?::\d+)+\] *",  # UCX: [node1:4711 :0:4711]
    r"\[" + _LINE_OF + r":\d+\]:? ?",  # a logger's [train.py:182], which has the form of [node1:3]
    r"\[(?P<node>[A-Za-z][\w.-]*):(?:(?P<label>\d{1,4})|agent)\] ?",  # dtctl: [node1:3]
    r"\[(?!(?:pid|tid|line|step|epoch)\d)[a-z_]+(?P<local>\d+)(?:\|\d+)?\]:(?: |$)?",  # torchrun --tee: [default3]:
    r"\[(?:[\w.@-]+@)?\d+,(?P<rank>\d+)\]<std(?:out|err|diag)>: ?",  # mpirun --tag-output
    r"\[(?P<rank>\d+)\]<std(?:out|err)>: ?",  # horovodrun
    r"\[pod/(?P<node>[\w.-]+)/[\w.-]+\] ",  # kubectl logs --prefix
    _ISO,
    r"\[[IWEF]" + _STAMP + r" [^\]]*\] ?",  # glog, as torch writes it
    r"\[[IWEF](?P<date>\d{3}) (?P<clock>" + _CLOCK + r") [^\]]*\] ?",  # torch, where a month has one digit
    r"\[[IWEF] [\w.]+:\d+\] ?",  # torch before 2.2
    r"\[c10d\] ",
    r"\[(?:PG [^\]]*?)?(?i:rank)[ :=]*(?P<rank>\d+)\]:? ?",
    r"\[(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)\] (?=\[)",  # DeepSpeed, before the file
    r"\[[\w.]+\.py:\d+:\w+\] ",
    r"\[\d+\] (?=\[|NCCL|misc/|include/|transport/|\w+\.cc:)",  # a line number, or a GPU alone
    r"\[(?P<label>\d{1,4})\] (?=Traceback|  File|(?:\w+\.)*\w+Error: )",  # hydra -l, mpirun -l
)
_NUMBERS = (
    r"(?P<node>\w[\w.-]*):(?P<pid>\d+):\d+ \[(?:\d+|\w+)\] ",  # NCCL, if the name of a node is a number
    r" *\| +(?=\d{4}-\d\d-\d\d[T ])",  # CloudWatch, where it was copied from a table
    _ISO,
    r"(?P<clock>" + _CLOCK + r")[ |:,-]+",  # a time of day, which is no task number
    r" *(?P<label>\d{1,5}):(?!\d) ?(?=\S|  )",  # srun --label
    r"(?P<node>(?:\d{1,3}\.){3}\d{1,3}): " + _STARTS,  # pdsh
)
_LETTERS = (
    r"(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(?P<day>\d{1,2}) (?P<clock>" + _CLOCK + r") "
    r"(?P<node>[\w.-]+) (?=kernel|[\w./-]+(?:\[\d+\])?: )",  # syslog
    r"(?![A-Z]{1,4}\d{4,}:)(?P<node>[A-Za-z][\w.-]*\d[\w.-]*): (?:(?=(?P=node):)|"
    + _STARTS
    + ")",  # pdsh, no error code
    r"(?P<node>[a-z][\w.-]*\d) +\| ?" + _STARTS,  # docker compose
    r"[IWEF]" + _STAMP + r" +[^\]]*\] ?",  # torchrun's own messages
    r"(?P<node>[A-Za-z][\w.-]*):(?P<pid>\d+):\d+ \[(?:\d+|\w+)\] ",  # NCCL: node:pid:thread [gpu]
    r"std(?:out|err) [FP] ",  # containerd, behind the time
    r"rank(?P<rank>\d+)\[\d+\](?:\[\w+\])*: ",  # Composer
    r"(?:Rank|RANK|rank)[ =]?(?P<rank>\d+)(?:: | \| )" + _STARTS,
)
_PARENTHESES = (
    r"\([\w.-]+, rank=\d+, pid=\d+, ip=(?P<node>[\w.:-]+)\) ?",  # SkyPilot: ranks of nodes
    r"\((?:[\w.<>:/ -]+ )?(?:(?:rank|TP)=?(?P<rank>\d+) )?pid=(?P<pid>\d+)(?:, ip=(?P<node>[\w.:-]+))?\) "
    r"(?:\[repeated \d+x[^\]]*\] )?",
)  # Ray, vLLM
_PREFIXES = {
    start: tuple(re.compile(text) for text in texts)
    for starts, texts in (
        ("[", _BRACKETS),
        (string.digits + " ", _NUMBERS),
        (string.ascii_letters, _LETTERS),
        (":", (r": +(?=\[rank\d+\]:)",)),  # a terminal's multiplexer, or a name that was cut off
        ("(", _PARENTHESES),
    )
    for start in starts
}
"""Prefixes of launchers, by their first character."""
PROGRESS = re.compile(
    r"^\W*(?:global_?)?(?:step|iter(?:ation)?|epoch)\b\W{0,3}\d|\b(?:loss|lr|grad_norm|tokens_per_s|samples_per_s)"
    r"['\"]?\s*[=: ]\s*[-+]?\.?\d|\d(?:it/s|s/it)\b",
    re.IGNORECASE,
)
"""Pattern of lines that a run prints while it makes progress."""
_PATH_RANK = re.compile(r"(?:^|[._/-])rank[-_.]?(\d+)(?=[._/-]|$)")
_TORCHRUN_PATH = re.compile(r"attempt_\d+/(\d+)/std(?:out|err)\.log$")
_DTCTL_PATH = re.compile(r"(?:(?P<run>.*)/)?logs/(?P<node>[^/]+)/(?:rank-\d+|agent)\.log$")
_MONTH_DAYS = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """Line of a log, with the facts in its prefixes."""

    file: str
    number: int
    """Number of the line, from 1."""
    raw: str
    text: str
    """Text of the line without prefixes."""
    rank: int | None
    node: str | None
    time: float | None
    """Seconds since the beginning of the year, with months of 31 days, which suffices to order lines; None without a
    time."""
    pid: str | None = None
    """Process id, if a prefix has one."""


def parse_log_line(raw: str, *, file: str, number: int, rank: int | None, node: str | None) -> LogLine:
    """Return a line and the facts in its prefixes.

    Args:
        raw: line of the file, without its line end.
        file: path of the file.
        number: number of the line, from 1.
        rank: rank of the file; None if the file has several ranks.
        node: node of the file; None if the file has several nodes.
    """
    text = render_terminal_line(raw)
    if "/s" in text or "s/" in text:
        text = _BAR.sub("", text)
    time: float | None = None
    local: str | None = None
    pid: str | None = None
    by_logger = False
    is_label = False
    while text:
        for pattern in _PREFIXES.get(text[0], ()):
            found = pattern.match(text)
            if found is not None:
                break
        else:
            break
        groups = found.groupdict()
        label = groups.get("label")
        said = groups.get("rank") or (None if by_logger else label)
        if said is not None and (rank is None or (is_label and groups.get("rank"))):  # srun's label may be a node
            rank, is_label = int(said), not groups.get("rank")
        local = local or groups.get("local")
        node = node or (None if by_logger and label is not None else groups.get("node"))
        pid = pid or groups.get("pid")
        by_logger = by_logger or _of_logger(groups)
        if time is None:
            time = _parse_log_time(groups)
        text = text[found.end() :]
    if rank is None and local is not None:  # the local rank is right on one node, and nothing better is known
        rank = int(local)
    return LogLine(file=file, number=number, raw=raw, text=text, rank=rank, node=node, time=time, pid=pid)


def _of_logger(groups: dict[str, str | None]) -> bool:
    """Return whether a prefix comes from a logger inside of the process.

    A launcher's label precedes that of a logger, so a number after it is a process or the line of a file. A collector
    of lines may put a time in front of the label, in the format with a T.
    """
    iso = groups.get("iso")
    return groups.get("clock") is not None or (iso is not None and iso[10] != "T")


def render_terminal_line(text: str) -> str:
    """Return a line as a terminal would finally show it, shortened and without control characters."""
    if len(text) > LONGEST:
        text = text.rstrip("\r").rsplit("\r", 1)[-1][:LONGEST]
    if text.isprintable():
        return text
    return _UNSHOWN.sub("", _DECORATION.sub("", text).rstrip("\r").rsplit("\r", 1)[-1])


def _parse_log_time(groups: dict[str, str | None]) -> float | None:
    iso, date, clock = groups.get("iso"), groups.get("date"), groups.get("clock")
    if iso is not None:
        month, day, clock = int(iso[5:7]), int(iso[8:10]), iso[11:]
    elif date is not None:  # in E1206 and E321 the last two digits are the day, the others the month
        month, day = int(date[:-2]), int(date[-2:])
    elif groups.get("month") is not None:
        month, day = _MONTHS.index(groups["month"] or "") + 1, int(groups["day"] or 0)
    else:
        return None
    hours, minutes, seconds = (clock or "0:0:0").replace(",", ".").split(":")
    return ((month * _MONTH_DAYS + day) * 24 + int(hours)) * 3600 + int(minutes) * 60 + float(seconds)


def parse_log_owner(path: Path) -> tuple[int | None, str | None]:
    """Return the rank and the node of a log file, by its path."""
    text = path.as_posix()
    node = _DTCTL_PATH.search(text)
    rank = _PATH_RANK.search("/".join(text.split("/")[-2:])) or _TORCHRUN_PATH.search(text)
    return (int(rank[1]) if rank else None, node["node"] if node else None)


def find_log_run_folder(file: str) -> str | None:
    """Return the folder of the dtctl run that a log file belongs to, by its path; None if the path has none."""
    found = _DTCTL_PATH.search(file)
    return found["run"] if found else None
