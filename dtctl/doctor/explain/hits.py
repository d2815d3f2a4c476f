"""What stands in the lines of a log: known texts, unknown exceptions, and torchrun's own verdict. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dtctl.doctor.explain import signatures
from dtctl.doctor.explain.lines import Line
from dtctl.doctor.explain.signatures import Signature

EXCEPTION = Signature(
    id="exception",
    patterns=(),
    cause="the program raised {text}",
    fix="correct the program at {where}",
    source="https://docs.python.org/3/tutorial/errors.html",
    example="ValueError: sample 17 has no label",
)
"""An exception that no signature knows: that it was raised is a fact, and the line says where."""

_FINAL = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failed|Failure|Empty|Full)(?::|$)")
_FRAME = re.compile(r'^\s+File "(?P<path>[^"]+)", line (?P<line>\d+)')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<|^/pytorch/")
_TORCHRUN_HOST = re.compile(r"^\s+host\s*: (?P<host>\S+)")
_TORCHRUN_RANK = re.compile(r"^\s+rank\s*: (?P<rank>\d+) \(local_rank: \d+\)")
_TORCHRUN_CODE = re.compile(r"^\s+exitcode\s*: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A text that was found."""

    signature: Signature
    line: Line
    groups: dict[str, str]
    rank: int | None
    node: str | None
    time: float | None
    """Of the line, or of the last line before it in the same stream that had one."""
    root: bool = False
    """Whether torchrun calls this the first failure of its node."""


@dataclass(slots=True)
class _Stream:
    """What the lines of one rank in one file have said so far."""

    time: float | None = None
    in_traceback: bool = False
    where: str = ""
    host: str | None = None
    rank: int | None = None
    root: bool = False


def collect(lines: Iterable[Line]) -> tuple[list[Hit], set[int], dict[int, str]]:
    """Everything known that stands in the lines; all ranks that have printed; the node of each, where it is said."""
    hits: list[Hit] = []
    ranks: set[int] = set()
    node_of: dict[int, str] = {}
    streams: dict[tuple[str, int | None], _Stream] = {}
    for line in lines:
        if line.rank is not None:
            ranks.add(line.rank)
            if line.node is not None:
                node_of.setdefault(line.rank, line.node)
        stream = streams.setdefault((line.file, line.rank), _Stream())
        stream.time = line.time if line.time is not None else stream.time
        hit = _look(line, stream)
        if hit is not None:
            hits.append(hit)
    return hits, ranks, node_of


def _look(line: Line, stream: _Stream) -> Hit | None:
    text = line.text
    if text.startswith("Traceback (most recent call last)"):
        stream.in_traceback, stream.where = True, ""
    elif stream.in_traceback and (frame := _FRAME.match(text)):
        if not _LIBRARY.search(frame["path"]):
            stream.where = f"{frame['path']}:{frame['line']}"
        return None
    _follow_torchrun(text, stream)
    found = signatures.find(text)
    if found is not None and not text.startswith(
        "    "
    ):  # the source lines of a traceback quote what they compare with
        stream.in_traceback = False
        hit = _hit(found[0], line, stream, found[1])
        if _TORCHRUN_CODE.match(text):
            return replace(hit, rank=stream.rank, node=stream.host, root=stream.root)
        return hit
    if stream.in_traceback and _FINAL.match(text):
        stream.in_traceback = False
        name = text if len(text) <= 200 else text[:200] + "…"
        where = stream.where or "the line that its traceback names"
        return _hit(EXCEPTION, line, stream, {"text": name.rstrip(": "), "where": where})
    return None


def _follow_torchrun(text: str, stream: _Stream) -> None:
    if text.startswith("Root Cause (first observed failure)"):
        stream.root = True
    elif text.startswith("====="):
        stream.root = False
    elif host := _TORCHRUN_HOST.match(text):
        stream.host = host["host"]
    elif rank := _TORCHRUN_RANK.match(text):
        stream.rank = int(rank["rank"])


def _hit(signature: Signature, line: Line, stream: _Stream, groups: dict[str, str]) -> Hit:
    return Hit(signature=signature, line=line, groups=groups, rank=line.rank, node=line.node, time=stream.time)
