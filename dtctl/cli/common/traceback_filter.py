"""Filter that shortens uninformative tracebacks to one line: those of workers that lost a peer, and torchrun's own.

Log files keep the whole traceback; the filter decides what the user sees during a run. A traceback is held back until
its last line shows its kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dtctl.launch.control.failure import CONSEQUENCES
from dtctl.supervisor.frames import AGENT

LONGEST = 400
"""Largest number of lines of a traceback that are held back; a longer one is shown as it arrives."""
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
"""Line of an agent that has lost the store, which ends with the head node's agent, or whose wait for other agents has
timed out. This mostly happens at the barrier of the agents at the end, and does not change the result of the
workers."""
_AGENT_ERROR = re.compile(
    r"^(?:[\w.]+\.)?(ChildFailedError|SignalException|Dist\w+Error|Rendezvous\w+(?:Error|Exception)?)\b"
)
_NATIVE = re.compile(r"^(Exception raised from |frame #\d+|<omitting|C\+\+ CapturedTraceback)")


@dataclass(slots=True)
class _ProcessOutput:
    """Output of one process."""

    held: list[str] | None = None
    """Lines of an incomplete traceback."""
    folded: bool = False
    """True if the last traceback was shortened, so that the lines that belong to it are dropped, too."""
    report_rules: int = 0
    """Number of ruled lines that are still missing from torchrun's report of a failure."""


@dataclass(slots=True)
class TracebackFilter:
    """Filter that receives lines one by one and returns those to show."""

    _streams: dict[tuple[str, int], _ProcessOutput] = field(default_factory=dict)
    _torchrun_told: bool = False

    def feed(self, node: str, rank: int, text: str) -> list[str]:
        """Return the lines to show after this one has arrived."""
        stream = self._streams.setdefault((node, rank), _ProcessOutput())
        line = _RANK.sub("", text)
        if stream.held is not None:
            return self._fold_traceback(stream, node, rank, text, line)
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
            stream.folded = not _AGENT_LINE.match(line)  # the stack that follows belongs to this line
            return []
        return [text]

    def flush(self) -> list[tuple[str, int, str]]:
        """Return the lines of incomplete tracebacks, as (node, rank, text)."""
        held = [(*key, text) for key, stream in self._streams.items() for text in stream.held or ()]
        self._streams.clear()
        return held

    def _fold_traceback(self, stream: _ProcessOutput, node: str, rank: int, text: str, line: str) -> list[str]:
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
        return [f"lost a peer: {_shorten_exception_line(line)} (`dtctl logs --node {node} --rank {rank}` shows where)"]


def _shorten_exception_line(line: str) -> str:
    """Return the message of an exception without the library's source file."""
    text = re.sub(r"\[/?\S+:\d+\] ", "", line).partition(". ")[0]
    return text if len(text) <= 100 else f"{text[:100].rstrip()} ..."
