"""Exceptions in Python's output: tracebacks, which may be interleaved with other processes' lines, and chains.

A traceback is recognized by its structure and not by the name of its exception: a header or a frame, further frames,
and the first line that is not indented. The text before the header (a log's prefix) is removed from the lines that
follow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from dtctl.doctor.explain.lines import PROGRESS, LogLine

Link = Literal["", "cause", "context", "inner"]
HEADER = "Traceback (most recent call last)"
LONGEST_GAP = 120
"""Largest number of other lines between a frame and its exception."""
LONGEST_REPORT = 600
"""Largest number of lines of a logger's report of its own error."""
MAX_DETAIL = 16
"""Number of further lines of a message that are kept."""
_FRAME = re.compile(r'^[\s>|+^]*File "(?P<path>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?\s*$')
_CELL_FRAME = re.compile(r"^(?:File )?(?P<path>[~/][^\s:]+\.py)(?::(?P<line>\d+),)? in (?P<function>[\w<>.]+)\(")
_RICH_FRAME = re.compile(r"^[│|]\s+(?P<path>/?[\w~./<>@+ -]+\.py):(?P<line>\d+) in (?P<function>[\w<>.]+)")
_NAME = re.compile(r"^(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_<][\w<>]*)*)(?:\((?P<of>\w+)\))?(?:: ?(?P<message>.*)|\s*)$")
"""Pattern of names that count as an exception if they stand after frames."""
_BUILTIN = frozenset(
    [
        "ArithmeticError",
        "AssertionError",
        "AttributeError",
        "BaseException",
        "BlockingIOError",
        "BrokenPipeError",
        "BufferError",
        "EOFError",
        "Exception",
        "ExceptionGroup",
        "GeneratorExit",
        "IOError",
        "ImportError",
        "IndexError",
        "InterruptedError",
        "KeyError",
        "KeyboardInterrupt",
        "LookupError",
        "MemoryError",
        "OSError",
        "RuntimeError",
        "StopAsyncIteration",
        "StopIteration",
        "SystemExit",
        "TypeError",
        "ValueError",
    ]
)
_ENDS = (
    r"(?:Error|Exception|Interrupt|Exit|Failed|Failure|Exceeded|NotFound|Expired|Timeout|Refused|Denied|"
    r"Invalid|Corrupt|Unavailable)"
)
_SURE = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*(?:[A-Z_]\w*" + _ENDS + r"|" + "|".join(_BUILTIN) + r"))"
    r"(?:\((?P<of>\w+)\))?(?:: ?(?P<message>.*)|:?\s*)$"
)
"""Pattern of names that by convention are an exception anywhere in a traceback."""
_BARE = re.compile(
    r"^(?:(?:[|> E]\s+)|(?:\s*\"message\": \")|(?:(?:\S+ )?(?:ERROR|CRITICAL|FATAL|Error|error|"
    r"Exception)\b[\]:\s|-]+))?"
    r"(?P<name>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt)))(?:\((?P<of>\w+)\))?: ?(?P<message>\S.*)$"
)
"""Pattern of an exception without a traceback; it needs a message, since any word could be a name."""
_LEVELS = frozenset(
    [
        "INFO",
        "WARNING",
        "WARN",
        "DEBUG",
        "ERROR",
        "CRITICAL",
        "FATAL",
        "NOTE",
        "Note",
        "note",
        "TRACE",
        "Warning",
        "warning",
        "Error",
        "error",
        "info",
        "debug",
        "Epoch",
        "epoch",
        "Step",
        "step",
        "Iteration",
        "iteration",
        "loss",
        "Loss",
        "wandb",
        "srun",
        "slurmstepd",
        "mpirun",
    ]
)
_LINKS: tuple[tuple[str, Link], ...] = (
    ("During handling of the above exception, another exception occurred", "context"),
    ("The above exception was the direct cause of the following exception", "cause"),
)
_INNER = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error|^Original Traceback|^Original error")
_RANKED = re.compile(r"\((?:RANK|rank) (?P<rank>\d+)\)\s*$")
_IGNORED = re.compile(
    r"^(?:Exception ignored (?:in|on|while)|Error in atexit\._run_exitfuncs|--- Logging error ---"
    r"|Error in sys\.excepthook|Task exception was never retrieved|Future exception was never retrieved)"
)
_THREAD = re.compile(r"^Exception in thread ")
_REMOTE = re.compile(r"(?P<name>\S*RayTaskError(?:\((?P<of>\w+)\))?): ray::\S+ \(pid=\d+(?:, ip=(?P<node>[\w.:]+))?")
_STACK = re.compile(r"^(?:Fatal Python error: (?P<what>.+)|Current thread 0x|Thread 0x)")
_NEW_THOUGHT = re.compile(
    r"^(?:\d{4}[-/]\d\d|\[\d{4}-|\[?[IWEF]\d{3,4} |(?:INFO|WARNING|DEBUG|ERROR|CRITICAL)\b|={5,}|\*{5,}|"
    r"[\w./-]+:\d+:\d+ \[|srun:|slurmstepd:"
    r"|wandb:|\S*%\||Traceback |Process finished|Killing |Sending |Terminating |\[pip3\]|\S*ChildFailedError|"
    r"\w+:\w+(?:\.\w+)+:|frame #|\w+Warning:|-{10,}|Primary job|Killed|Exception raised from|terminate called|"
    r"\[(?:rank|c10d|"
    r"default|trainer|E |W ))"
)
_SOURCE = re.compile(r"^\s{4,}(?:raise|return|with|for|if|self\.|await|yield|\w[\w.]*\()")
"""Pattern of a source line, which is not part of a message."""
_TOLD = re.compile(r"\b(?:INFO|DEBUG|WARN(?:ING)?)\b")
_NUMBERS = re.compile(r"\d+(?:[:.,/-]\d+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracebackFrame:
    """Call in a traceback."""

    path: str
    line: int
    function: str
    source: str = ""

    @property
    def where(self) -> str:
        """Return the place of the call as text: `/job/train.py:17`."""
        return f"{self.path}:{self.line}"


@dataclass(slots=True, kw_only=True)
class PrintedException:
    """Exception in the output."""

    name: str
    """Name with its modules, as printed."""
    message: str
    line: LogLine
    frames: tuple[TracebackFrame, ...] = ()
    """Calls of the traceback, the innermost last."""
    detail: list[str] = field(default_factory=list)
    """Further lines of the message."""
    bare: bool = False
    """True if the exception has no traceback."""
    ignored: bool = False
    """True if Python or a logger reports that the exception has no effect."""
    rank: int | None = None
    """Rank of the process that raised the exception, if a parent passes it on."""
    node: str | None = None
    before: PrintedException | None = None
    """Exception from which this one was raised, or during whose handling it was raised."""
    link: Link = ""
    """Relation to the exception before it."""
    passed_on: bool = False
    """True if a later exception of the chain replaces this one."""
    told: bool = False
    """True if the traceback was printed as information or a warning."""
    cut: bool = False
    """True if the beginning of the traceback is missing."""

    @property
    def short(self) -> str:
        """Return the name without the modules."""
        return self.name.rpartition(".")[2]

    @property
    def text(self) -> str:
        """Return the last line of the exception, with the whole message in that line."""
        said = f"{self.name}: {self.message}" if self.message else self.name
        return " ".join([said, *(line.strip() for line in self.detail)]).strip()

    @property
    def message_lines(self) -> str:
        """Return the last line and lines that certainly belong to the message; later ones may be other output."""
        parts = [f"{self.name}: {self.message}" if self.message else self.name]
        for line in self.detail:
            is_first = len(parts) == 1 and not self.message
            is_open = is_first or line[:1].isspace() or parts[-1].endswith((":", ",", "(", "["))
            if not (line.strip() and is_open):
                break
            parts.append(line.strip())
        return " ".join(parts)

    def chain(self) -> list[PrintedException]:
        """Return the exceptions of the chain from the first one to this one."""
        found: list[PrintedException] = [self]
        while found[-1].before is not None and len(found) < 20:
            found.append(found[-1].before)
        return found[::-1]


@dataclass(slots=True)
class TracebackReader:
    """Reader that finds exceptions in the lines of one process, or of several that write into one stream."""

    opened: int = 0
    """Number of tracebacks that have begun and whose exception is not printed yet."""
    frames: list[TracebackFrame] = field(default_factory=list)
    gap: int = 0
    """Number of lines since the last one that belongs to a traceback."""
    adjacent: bool = False
    rich: bool = False
    link: Link = ""
    last: PrintedException | None = None
    saying: PrintedException | None = None
    """Exception whose message may continue."""
    ignored: int = 0
    """Number of lines within which a traceback belongs to an exception that Python ignores."""
    rank: int | None = None
    node: str | None = None
    prefix: re.Pattern[str] | None = None
    """Prefix of each line of the traceback that the general prefixes do not cover."""
    indent: int = 0
    at: LogLine | None = None
    """Line of the last frame of the traceback so far."""
    told: bool = False
    """True if the header follows a word like INFO."""
    cut: bool = False
    """True if the header is missing."""
    of_logger: int = 0
    """Number of lines within which a logger reports an error of its own: a traceback, a call stack, and the message."""

    @property
    def is_in_traceback(self) -> bool:
        """Return whether the next line may be an exception, or the rest of a message."""
        return self.opened > 0 or self.saying is not None or self.ignored > 0

    def feed(self, line: LogLine) -> tuple[bool, PrintedException | None]:
        """Return whether the line only belongs to a traceback, and the exception that the line completes."""
        text = self._without_prefix(line.text)
        self.ignored = max(0, self.ignored - 1)
        if self.of_logger:
            self.of_logger -= 1
            if text.startswith(("Call stack:", "Message: ", "Arguments: ")):
                self.opened, self.frames, self.saying, self.link = 0, [], None, ""
                self.of_logger = 0 if text.startswith("Arguments: ") else self.of_logger
                return True, None
        if HEADER in text:
            self._begin_traceback(text)
            return True, None
        if self._is_frame(text):
            self.at = line
            return True, None
        if self._is_link(text):
            return True, None
        if self.opened:
            found, taken = self._in_traceback(text, line)
            if found is not None or taken:
                return found is None, found
        elif self.saying is not None and self._goes_on(text, line):
            return False, None
        if text[:1] in "│╭╰┃┏┗" and len(text) > 1:  # a box of rich whose beginning is missing
            return True, None
        if (remote := _REMOTE.search(text)) is not None:
            self.opened, self.adjacent, self.gap, self.frames, self.node = 1, True, 0, [], remote["node"]
            return True, None
        bare = _BARE.match(text)
        if bare is not None:
            return False, self._close_traceback(bare, line, bare_=True)
        return False, None

    def get_unfinished_traceback(self) -> PrintedException | None:
        """Return the traceback whose exception was never printed; None without one."""
        if len(self.frames) == 1 and "/lib/python" in self.frames[0].path:  # a fragment of a traceback
            return None
        launcher = self.frames and any(
            part in self.frames[-1].path for part in ("/torch/distributed/run", "/torch/distributed/launch", "runpy")
        )
        if (
            not self.opened
            or not self.frames
            or launcher
            or self.at is None
            or self.ignored
            or _at_the_end(self.frames)
        ):
            return None
        return PrintedException(name="an exception", message="", line=self.at, frames=tuple(self.frames))

    def _without_prefix(self, text: str) -> str:
        if self.prefix is not None and (found := self.prefix.match(text)):
            return text[found.end() :]
        if self.indent and text[: self.indent].isspace():
            return text[self.indent :]
        return text

    def _begin_traceback(self, text: str) -> None:
        head = text[: text.index(HEADER)]
        self.saying = None
        self.told, self.cut = _TOLD.search(head) is not None, False
        if _INNER.match(text) or head.strip() == "Original":
            self.link = "inner"
        elif head.strip() in ("traceback :", "traceback:"):
            self.indent = len(head) - len(head.lstrip())
        elif head.startswith(("╭", "┌", "+-")) or "─" in head:
            self.rich = True
        elif head.strip() and len(head) <= 160 and not re.fullmatch(r"\w+\s+|[\s|+]*(?:Exception Group )?", head):
            self.prefix = re.compile(
                _NUMBERS.sub(r"[\\d:.,/-]+", re.escape(head).replace(r"\-", "-").replace(r"\ ", " "))
            )
        if (ranked := _RANKED.search(text)) is not None:
            self.rank = int(ranked["rank"])
            if self.last is not None and self.last.short == "CheckpointException" and not self.last.passed_on:
                self.link = "inner"
        if not self.opened or self.gap > LONGEST_GAP:
            self.opened, self.frames = 0, []
        self.opened = min(self.opened + 1, 64)
        self.adjacent, self.gap = True, 0

    def _is_frame(self, text: str) -> bool:
        found = _FRAME.match(text)
        if found is None and self.rich:
            found = _RICH_FRAME.match(text)
        if found is None and self.opened:
            found = _CELL_FRAME.match(text)
        if found is None:
            return False
        if not self.opened:  # the copied text begins in the middle of a traceback
            self.opened, self.frames, self.cut = 1, [], True
        groups = found.groupdict()
        self.frames.append(
            TracebackFrame(
                path=groups["path"], line=int(groups["line"] or 0), function=(groups["function"] or "").strip()
            )
        )
        if len(self.frames) > 400:
            del self.frames[100:200]
        self.adjacent, self.gap, self.saying = True, 0, None
        return True

    def _is_link(self, text: str) -> bool:
        if text.startswith(("During", "The above")):
            for said, link in _LINKS:
                if text.startswith(said):
                    self.link, self.saying = link, None
                    return True
        if (inner := _INNER.search(text)) is not None:
            self.link, self.saying = "inner", None
            self.rank = int(inner["rank"]) if inner["rank"] else self.rank
            return True
        if _IGNORED.match(text):
            self.ignored, self.saying = LONGEST_GAP, None
            self.of_logger = LONGEST_REPORT if "Logging error" in text else 0
            return True
        return _THREAD.match(text) is not None

    def _in_traceback(self, text: str, line: LogLine) -> tuple[PrintedException | None, bool]:
        if self.rich and text[:1] in "│|╰└":
            self.adjacent = True
            return None, True
        if text[:1] in (" ", "\t", "|", "+") or (not text.strip() and self.adjacent):
            if self.adjacent and self.frames and text.strip() and not self.frames[-1].source:
                last = self.frames[-1]
                self.frames[-1] = TracebackFrame(
                    path=last.path, line=last.line, function=last.function, source=text.strip()[:200]
                )
            indented = re.match(r"^[\s|+]+(?=\S)", text)
            if indented is None or (sure := _SURE.match(text[indented.end() :])) is None or "|" not in indented[0]:
                return None, self.adjacent
            return self._close_traceback(sure, line), False
        found = _SURE.match(text)
        if found is None and self.adjacent and self.frames:
            found = _NAME.match(text)
            if found is not None and (
                found["name"] in _LEVELS
                or (found["message"] is None and "." not in found["name"] and not found["name"][0].isupper())
            ):
                found = None
        if found is not None:
            return self._close_traceback(found, line), False
        self.adjacent = False
        self.gap += 1
        if self.gap > LONGEST_GAP:
            self.opened, self.frames, self.rich = 0, [], False
        return None, False

    def _close_traceback(self, found: re.Match[str], line: LogLine, *, bare_: bool = False) -> PrintedException:
        raised = PrintedException(
            name=found["name"],
            message=(found["message"] or "").strip().removesuffix('",'),
            line=line,
            frames=tuple(self.frames),
            bare=bare_, rank=self.rank, node=self.node,
            ignored=self.ignored > 0 or self.of_logger > 0 or _at_the_end(self.frames),
            told=self.told and not bare_, cut=self.cut and not bare_,
        )  # fmt: skip
        if not bare_ or self.link:
            if self.link == "inner" and self.last is not None:
                self.last.before, self.last.link, raised.passed_on = raised, "inner", True
            elif self.link and self.last is not None:
                raised.before, raised.link, self.last.passed_on = self.last, self.link, True
        self.link = ""
        self.ignored = 0
        self.opened = max(0, self.opened - 1)
        if not self.opened:
            self.frames, self.rich, self.prefix, self.indent = [], False, None, 0
            self.rank = self.node = None
        self.last = self.saying = raised
        self.adjacent = False
        return raised

    def _goes_on(self, text: str, line: LogLine) -> bool:
        said = self.saying
        if said is None:
            return False
        if (
            len(said.detail) >= MAX_DETAIL
            or (line.time is not None and said.line.time is None)  # a logger's line cannot continue a printed message
            or _NEW_THOUGHT.match(text)
            or PROGRESS.search(text)
            or _BARE.match(text) is not None
        ):
            self.saying = None
            return False
        if (not text.strip() and said.detail and not said.detail[-1]) or _SOURCE.match(text):
            self.saying = None
            return False
        if any(letter.isalnum() for letter in text) or not text.strip():
            said.detail.append(text[:500])
        return True


_AT_THE_END = ("_run_exitfuncs", "_exit_function", "_cleanup")


def _at_the_end(frames: list[TracebackFrame]) -> bool:
    """Return whether the exception occurred in a destructor or at exit, where Python ignores it."""
    if not frames:
        return False
    is_thread_of_closed_queue = frames[0].function == "_bootstrap_inner" and frames[-1].function == "_check_closed"
    return (
        is_thread_of_closed_queue
        or frames[0].function in _AT_THE_END
        or any(frame.function in ("__del__", "_shutdown_workers") for frame in frames)
    )
