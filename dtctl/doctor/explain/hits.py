"""What stands in the lines of a log: known texts, unknown exceptions, and torchrun's own verdict. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from dtctl.doctor.explain import signatures
from dtctl.doctor.explain.lines import LogLine
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
_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt): ?\S")
"""The same without a traceback above it: with a message, or it may be any word."""
_FRAME = re.compile(r'^\s+File "(?P<path>[^"]+)", line (?P<line>\d+)')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<|^/pytorch/")
_TORCHRUN_HOST = re.compile(r"^\s+host\s*: (?P<host>\S+)")
_TORCHRUN_RANK = re.compile(r"^\s+rank\s*: (?P<rank>\d+) \(local_rank: \d+\)")
_TORCHRUN_CODE = re.compile(r"^\s+exitcode\s*: ")
_PROGRESS = re.compile(
    r"^\W*(?:global_?)?(?:step|iter(?:ation)?|epoch)\b\W{0,3}\d|\b(?:loss|lr|grad_norm|tokens_per_s|samples_per_s)"
    r"['\"]?\s*[=: ]\s*[-+]?\.?\d|\d(?:it/s|s/it)\b",
    re.IGNORECASE,
)
"""What a training prints while it goes on."""
_ENDED_WELL = re.compile(
    r"\btraining (?:is |has )?(?:finished|completed?|done|ended)\b(?!.*(?:error|fail))"
    r"|\b(?:finished|completed|exited) successfully\b",
    re.IGNORECASE,
)
UNLABELLED = 5
"""Lines of progress after a traceback whose rank is not said, until it counts as survived: ranks die one after
another, and a line of another rank may come in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A text that was found."""

    signature: Signature
    line: LogLine
    groups: dict[str, str]
    rank: int | None
    node: str | None
    time: float | None
    """Of the line, or of the last line before it in the same stream that had one."""
    root: bool = False
    """Whether torchrun calls this the first failure of its node."""
    bare: bool = False
    """Whether an exception stands there without its traceback."""
    survived: bool = False
    """Whether the same rank has trained on afterwards, or ended well."""


@dataclass(slots=True)
class _Stream:
    """What the lines of one rank in one file have said so far."""

    time: float | None = None
    in_traceback: bool = False
    where: str = ""
    host: str | None = None
    rank: int | None = None
    root: bool = False
    open: list[tuple[int, int]] = field(default_factory=list)
    """Hits that nothing shows to be survived: which, and how many lines of progress would show it."""


def collect(lines: Iterable[LogLine]) -> tuple[list[Hit], set[int], dict[int, str]]:
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
        stream = streams.get((line.file, line.rank))
        if stream is None:
            stream = streams[line.file, line.rank] = _Stream()
        stream.time = line.time if line.time is not None else stream.time
        raised = stream.in_traceback
        hit = _look(line, stream)
        if hit is not None:
            stream.open.append((len(hits), UNLABELLED if raised and line.rank is None else 1))
            hits.append(hit)
        elif stream.open:
            _survive(line.text, stream, hits)
    return hits, ranks, node_of


def _survive(text: str, stream: _Stream, hits: list[Hit]) -> None:
    """Mark what a rank has found and trained on after."""
    if _ENDED_WELL.search(text):
        stream.open = [(which, 0) for which, _ in stream.open]
    elif _PROGRESS.search(text):
        stream.open = [(which, needed - 1) for which, needed in stream.open]
    else:
        return
    for which, needed in stream.open:
        if needed <= 0:
            hits[which] = replace(hits[which], survived=True)
    stream.open = [(which, needed) for which, needed in stream.open if needed > 0]


def _look(line: LogLine, stream: _Stream) -> Hit | None:
    text = line.text
    if text.startswith("Traceback (most recent call last)"):
        stream.in_traceback, stream.where = True, ""
    elif stream.in_traceback and (frame := _FRAME.match(text)):
        if not _LIBRARY.search(frame["path"]):
            stream.where = f"{frame['path']}:{frame['line']}"
        return None
    _follow_torchrun(text, stream)
    found = signatures.find(text)
    # The source lines of a traceback quote what they compare with.
    if found is not None and not text.startswith("    "):
        stream.in_traceback = False
        hit = _hit(found[0], line, stream, found[1])
        if _TORCHRUN_CODE.match(text):
            return replace(hit, rank=stream.rank, node=stream.host, root=stream.root)
        return hit
    raised = stream.in_traceback and _FINAL.match(text) is not None
    if raised or _RAISED.match(text):
        name = text if len(text) <= 200 else text[:200] + "…"
        where = stream.where if raised else ""
        stream.in_traceback = False
        hit = _hit(
            EXCEPTION, line, stream, {"text": name.rstrip(": "), "where": where or "the line that its traceback names"}
        )
        return hit if raised else replace(hit, bare=True)
    return None


def _follow_torchrun(text: str, stream: _Stream) -> None:
    if text[:1] not in (" ", "R", "="):
        return
    if text.startswith("Root Cause (first observed failure)"):
        stream.root = True
    elif text.startswith("====="):
        stream.root = False
    elif host := _TORCHRUN_HOST.match(text):
        stream.host = host["host"]
    elif rank := _TORCHRUN_RANK.match(text):
        stream.rank = int(rank["rank"])


def _hit(signature: Signature, line: LogLine, stream: _Stream, groups: dict[str, str]) -> Hit:
    return Hit(signature=signature, line=line, groups=groups, rank=line.rank, node=line.node, time=stream.time)
