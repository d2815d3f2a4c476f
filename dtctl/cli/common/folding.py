"""Tracebacks that explain nothing, as one line: of workers that only lost a peer, and torchrun's of its own exit.

Files keep all of it; this decides what the user sees during a run. A traceback is held back for a moment, until its
last line shows its kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dtctl.launch.control.failure import AGENT, CONSEQUENCES

LONGEST = 400
"""Lines of a traceback that are held back; a longer one is shown as it comes."""
_RANK = re.compile(r"^\[(?:rank|default)\d+\]:\s?")
_BEGIN = re.compile(r"Traceback \(most recent call last\):$")
_CHAIN = re.compile(r"^(During handling of the above exception|The above exception was the direct cause)")
_AGENT_LINE = re.compile(
    r"^[IWEF]\d{4} [\d:.]+ \d+ (?:site-packages/)?torch/distributed/(?:elastic|run|launcher)"
    r"|^\*{20,}$|^Setting OMP_NUM_THREADS environment variable"
)
"""Lines of torchrun about its own work: the signals that it sends, and the number of threads."""
_STORE_GONE = re.compile(
    r"^\[[WE]\d{4} [\d:.]+ (?:TCPStore|socket)\.cpp:\d+\] \[c10d\] \w+"
    r"(?: failed on|: (?:poll for )?socket) SocketImpl\("
)
"""An agent has lost the store, which goes with the head node's agent, or has waited for the others as long as it does:
mostly at the barrier at which agents wait for each other once all is done, and that changes nothing about how its
workers ended."""
_AGENT_ERROR = re.compile(
    r"^(?:[\w.]+\.)?(ChildFailedError|SignalException|Dist\w+Error|Rendezvous\w+(?:Error|Exception)?)\b"
)
_NATIVE = re.compile(r"^(Exception raised from |frame #\d+|<omitting|C\+\+ CapturedTraceback)")


@dataclass(slots=True)
class _Stream:
    """The output of one process."""

    held: list[str] | None = None
    """Lines of a traceback that is not complete yet."""
    folded: bool = False
    """True if the last traceback was folded, so that what belongs to it is, too."""
    report_rules: int = 0
    """Ruled lines that torchrun's report of a failure has still to come."""


@dataclass(slots=True)
class Folding:
    """Takes lines as they come and gives those to be shown."""

    _streams: dict[tuple[str, int], _Stream] = field(default_factory=dict)
    _torchrun_told: bool = False

    def feed(self, node: str, rank: int, text: str) -> list[str]:
        """Return the lines to show now that this one has come."""
        stream = self._streams.setdefault((node, rank), _Stream())
        line = _RANK.sub("", text)
        if stream.held is not None:
            return self._traceback(stream, node, rank, text, line)
        if _BEGIN.match(line):
            stream.held = [text]
            return []
        if stream.report_rules:
            stream.report_rules -= line.startswith("=" * 20)
            return []
        if stream.folded and (not line.strip() or _CHAIN.match(line) or _NATIVE.match(line)):
            return []
        stream.folded = False
        if rank == AGENT and (_AGENT_LINE.match(line) or _STORE_GONE.match(line)):
            stream.folded = not _AGENT_LINE.match(line)  # the stack that follows belongs to it
            return []
        return [text]

    def flush(self) -> list[tuple[str, int, str]]:
        """Return the lines of tracebacks that were never completed, as (node, rank, text)."""
        held = [(*key, text) for key, stream in self._streams.items() for text in stream.held or ()]
        self._streams.clear()
        return held

    def _traceback(self, stream: _Stream, node: str, rank: int, text: str, line: str) -> list[str]:
        held = stream.held or []
        held.append(text)
        is_inside = line.startswith((" ", "\t")) or not line.strip() or _BEGIN.match(line) or _CHAIN.match(line)
        if is_inside and len(held) < LONGEST:
            return []
        stream.held, stream.folded = None, False
        if is_inside:
            return held
        if rank == AGENT:
            if not _AGENT_ERROR.match(line) or not any("torch/distributed/" in frame for frame in held):
                return held
            stream.folded = True
            stream.report_rules = 2 if "ChildFailedError" in line else 0
            was_told, self._torchrun_told = self._torchrun_told, True
            return [] if was_told else [f"torchrun reports its exit (`dtctl logs --node {node}` shows it)"]
        if not any(consequence in line for consequence in CONSEQUENCES):
            return held
        stream.folded = True
        return [f"lost a peer: {_short(line)} (`dtctl logs --node {node} --rank {rank}` shows where)"]


def _short(line: str) -> str:
    """Return the message of an exception, without the source file of the library."""
    text = re.sub(r"\[/?\S+:\d+\] ", "", line).partition(". ")[0]
    return text if len(text) <= 100 else f"{text[:100].rstrip()} ..."
