"""Several runs of a program in one log file, of which only the last one is explained. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtctl.doctor.explain import exception_classes
from dtctl.doctor.explain.log_findings import LogFindings, SignatureMatch

LASTING = frozenset(["time-limit", "cancelled", "preempted", "requeued", "node-failed", "agent-signalled", "hangup"])
"""Faults for which lines of progress, printed while the job was being ended, do not mean survival."""
ANOTHER_RUN = 100
"""Number of lines of progress after the end of a job that only another run can have printed."""
OPENING = 2
"""Number of lines at the beginning of a file whose repetition means that the program was restarted."""
_PRINTED_BY_ALL = re.compile(r"arning|Traceback|^\s*$|^\s*[=*#-]+\s*$|NCCL|^\[|(?i:rank)")
"""Pattern of lines that each of several processes may print first."""


@dataclass(slots=True)
class RunStartFinder:
    """Finder of positions at which the first lines of a file repeat."""

    opening: tuple[str, ...] = ()
    """Forms of the first lines of the file."""
    begun_again: list[tuple[int, bool]] = field(default_factory=list)
    """Lines at which the first of these lines repeats, and True if all of them do."""
    steps: int = 0
    """Number of lines of progress since the job was last ended from outside."""
    went_on: int = 0
    """Number of the last line of progress."""

    def check_run_start(self, form: str, number: int) -> bool:
        """Process a line of a file, without its digits; return whether a new run may begin with this line."""
        if len(self.opening) < OPENING:
            if self.opening or form.strip():
                self.opening += (form,)
            return False
        if form != self.opening[0] or _PRINTED_BY_ALL.search(form):
            return False
        self.begun_again.append((number, False))
        return True

    def confirm_run_start(self, form: str) -> None:
        """Process the line after one with which a new run may begin."""
        if form == self.opening[1] and not _PRINTED_BY_ALL.search(form):
            self.begun_again[-1] = (self.begun_again[-1][0], True)


def mark_earlier_runs(found: LogFindings, file: str, starts: RunStartFinder, *, lines: int) -> None:
    """Mark findings before the last start in a file into which several runs of a program have written.

    A start is a repetition of the file's first lines (or of the first line, if only one process writes), or, in the
    file of one process, a fatal exception that is followed by another one.
    """
    hits = [hit for hit in found.hits if hit.line.file == file]
    complaints = [hit for hit in found.complaints if hit.line.file == file]
    last_start = _find_last_start(found, hits, starts, lines)
    for hit in (*hits, *complaints):
        if hit.line.number < last_start:
            hit.survived = hit.restarted = True


def _find_last_start(found: LogFindings, hits: Sequence[SignatureMatch], starts: RunStartFinder, lines: int) -> int:
    """Return the number of the line at which the last run in a file starts; 0 if no run has ended before."""
    ends = [hit for hit in hits if hit.signature.id in LASTING or (hit.uncaught and not _passed_on(hit))]
    if not ends:
        return 0
    first_end = min(hit.line.number for hit in ends)
    is_one_process = not found.ranks and found.world <= 1 and not any(_of_several_processes(hit) for hit in hits)
    candidates = [0]
    for line, is_whole in starts.begun_again:
        is_start = line > first_end and (is_whole or is_one_process)
        if is_start and _says_more(line, hits, starts, lines):
            candidates.append(line)
    crashes = [hit for hit in ends if hit.uncaught and not is_of_a_parent(hit)]
    if is_one_process and len(crashes) > 1 and crashes[-1] is ends[-1] and all(hit.line.pid is None for hit in crashes):
        candidates.append(crashes[-2].line.number + 1)
    if ends[-1].signature.id in LASTING and starts.steps >= ANOTHER_RUN:
        candidates.append(ends[-1].line.number + 1)
    return max(candidates)


def _says_more(start: int, hits: Sequence[SignatureMatch], starts: RunStartFinder, lines: int) -> bool:
    """Return whether a run prints relevant lines after its first ones."""
    long = lines - start > 3 * OPENING
    return long or starts.went_on > start or any(hit.line.number > start for hit in hits)


def is_of_a_parent(hit: SignatureMatch) -> bool:
    """Return whether an exception only reports that another process has ended, or was ended."""
    return hit.raised is not None and (
        hit.raised.short in exception_classes.PASSING_ON or hit.raised.short == "SignalException"
    )


def _of_several_processes(hit: SignatureMatch) -> bool:
    """Return whether a finding shows several processes: the exit of a rank, or the loss of a peer."""
    lost = hit.raised is not None and hit.signature.role in ("effect", "symptom") and not is_of_a_parent(hit)
    return (hit.end is not None and bool(hit.end.ranks)) or (lost and hit.signature.id != "interrupted")


def _passed_on(hit: SignatureMatch) -> bool:
    return hit.raised is not None and (hit.raised.passed_on or hit.raised.ignored)
