"""Findings in a log: the process that printed each of them, its time, and the evidence of later lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dtctl.doctor.explain.activity import ProgramActivity
from dtctl.doctor.explain.facts import LogFacts
from dtctl.doctor.explain.interfaces import ReportedInterfaces
from dtctl.doctor.explain.launchers import ReportedExit
from dtctl.doctor.explain.lines import LogLine
from dtctl.doctor.explain.signatures import Signature
from dtctl.doctor.explain.tracebacks import PrintedException

_UNREADABLE = frozenset(["SyntaxError", "IndentationError", "TabError"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """Lines of a log file."""

    file: str
    rank: int | None
    node: str | None
    lines: Sequence[str]


@dataclass(slots=True, kw_only=True)
class SignatureMatch:
    """Match of a known text, an exception or the end of a process in a log."""

    signature: Signature
    line: LogLine
    groups: dict[str, str]
    rank: int | None
    node: str | None
    time: float | None
    """Time of the line, or of the last line with a time before it in the same file."""
    order: int = 0
    """Position among all findings."""
    ranks: tuple[int, ...] = ()
    """Further ranks that the line names."""
    root: bool = False
    """True if a launcher reports this as the first failure of its node."""
    bare: bool = False
    """True if an exception has no traceback."""
    warned: bool = False
    """True if the line is marked as no failure, for example as a warning."""
    late: bool = False
    """True if the line follows a line that reports the successful end of the training run."""
    survived: bool = False
    """True if the same rank continued training or ended successfully afterwards, or if the program was restarted."""
    restarted: bool = False
    """True if the program was restarted afterwards and has written into the same file."""
    raised: PrintedException | None = None
    """Exception, if the finding is one."""
    weight: int = 3
    """Strength of the finding; see exception_classes.ExplainedException."""
    end: ReportedExit | None = None
    """End of a process, if the finding is one."""
    before: ProgramActivity | None = None
    """Last activity of the program before the line."""

    @property
    def uncaught(self) -> bool:
        """Return whether the exception has ended its process, since no outer frame caught it."""
        frames = self.raised.frames if self.raised is not None else ()
        if self.raised is not None and self.raised.short in _UNREADABLE and len(frames) == 1:
            return True  # the file that was started itself
        return bool(frames) and frames[0].function in ("<module>", "_run_module_as_main")


@dataclass(slots=True)
class LogFindings:
    """All findings from the logs."""

    hits: list[SignatureMatch] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    """Ranks that have printed anything."""
    node_of: dict[int, str] = field(default_factory=dict)
    watching: list[LogLine] = field(default_factory=list)
    """Lines of watchdogs."""
    interfaces: ReportedInterfaces = field(default_factory=ReportedInterfaces)
    facts: LogFacts = field(default_factory=LogFacts)
    nodes: set[str] = field(default_factory=set)
    """Nodes that have printed anything."""
    world: int = 0
    complaints: list[SignatureMatch] = field(default_factory=list)
    """Lines with an unknown error message that were not clearly survived."""
    length: dict[str, int] = field(default_factory=dict)
    """Number of lines of each file."""
    last_said: ProgramActivity | None = None
    """Last line of the program itself."""
