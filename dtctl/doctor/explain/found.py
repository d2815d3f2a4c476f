"""Finds in a log: the process that printed them, their time, and the lines that came afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dtctl.doctor.explain.activity import Activity
from dtctl.doctor.explain.facts import Facts
from dtctl.doctor.explain.interfaces import Interfaces
from dtctl.doctor.explain.launchers import ReportedExit
from dtctl.doctor.explain.lines import LogLine
from dtctl.doctor.explain.signatures import Signature
from dtctl.doctor.explain.tracebacks import Raised

_UNREADABLE = frozenset(["SyntaxError", "IndentationError", "TabError"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of lines, as it was read."""

    file: str
    rank: int | None
    node: str | None
    lines: Sequence[str]


@dataclass(slots=True, kw_only=True)
class Hit:
    """Something that was found."""

    signature: Signature
    line: LogLine
    groups: dict[str, str]
    rank: int | None
    node: str | None
    time: float | None
    """Time of the line, or of the last line before it in the same file that had one."""
    order: int = 0
    """Place among all finds."""
    ranks: tuple[int, ...] = ()
    """Further ranks that it names."""
    root: bool = False
    """True if a launcher calls this the first failure of its node."""
    bare: bool = False
    """True if an exception stands there without its traceback."""
    warned: bool = False
    """True if the line is marked as no failure, such as a warning."""
    late: bool = False
    """True if it comes after a line that reports the successful end of the training."""
    survived: bool = False
    """True if the same rank has trained on afterwards, or ended well, or the program was started again."""
    restarted: bool = False
    """True if the program was started again after it, and has written into the same file."""
    raised: Raised | None = None
    """The exception that it is."""
    weight: int = 3
    """Strength of the find; see kinds.Explained."""
    end: ReportedExit | None = None
    """The end of a process that it is."""
    before: Activity | None = None
    """Last activity of the program before it."""

    @property
    def uncaught(self) -> bool:
        """Return whether the exception has ended its process: nothing above the program's first line caught it."""
        frames = self.raised.frames if self.raised is not None else ()
        if self.raised is not None and self.raised.short in _UNREADABLE and len(frames) == 1:
            return True  # the file that was started itself
        return bool(frames) and frames[0].function in ("<module>", "_run_module_as_main")


@dataclass(slots=True)
class Found:
    """All findings from the logs."""

    hits: list[Hit] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    """Ranks that have printed anything."""
    node_of: dict[int, str] = field(default_factory=dict)
    watching: list[LogLine] = field(default_factory=list)
    """Lines of a watchdog."""
    interfaces: Interfaces = field(default_factory=Interfaces)
    facts: Facts = field(default_factory=Facts)
    nodes: set[str] = field(default_factory=set)
    """Nodes that have printed anything."""
    world: int = 0
    complaints: list[Hit] = field(default_factory=list)
    """Lines with an unknown error message, without a sign that it was survived."""
    length: dict[str, int] = field(default_factory=dict)
    """Lines of each file."""
    last_said: Activity | None = None
    """The last line of the program's own."""
