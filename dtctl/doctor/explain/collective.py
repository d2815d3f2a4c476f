"""Search for the rank that made others wait in a collective, from the output of all ranks' watchdogs. Pure.

Every rank counts its collectives. One table of all reports (rank, process group, number, operation, sizes) shows which
ranks differ. If the ranks timed out at different numbers, the rank with the lowest number is late. If one rank has not
timed out, the others waited for it. If ranks timed out in different operations of the same number, the program calls
collectives in different order. If the logs of some ranks are missing, a rank is not blamed for having no report.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dtctl.doctor.explain.lines import LogLine

_TIMEOUT = re.compile(
    r"WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)(?:, (?:NumelIn=(?P<numel>\d+)|"
    r"TensorShape=\[(?P<shape>[\d, ]*)\]))?"
)
_SPOKEN_RANK = re.compile(
    r"[Rr]ank (?P<rank>\d+)\] (?:Watchdog|Timeout|Exception|Process group|Found|Some|To avoid|Received)|\bRank "
    r"(?P<named>\d+)\]"
)
_LAST = re.compile(
    r"last enqueued (?:NCCL )?work: (?P<enqueued>\d+), last completed (?:NCCL )?work: (?P<completed>\d+)"
)
_GROUP = re.compile(r"\[PG (?:ID )?(?P<group>\d+)")
_LAGGING = re.compile(
    r"ranks? \[(?P<ranks>[\d, ]+)\] (?:are|is) the lagging|lagging(?:/dead/mismatched)? ranks? .*?\[(?P<more>[\d, ]+)\]"
)
_FIXED_SIZE = ("ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "ALLGATHER_BASE")
"""Operations for which every rank contributes the same number of elements."""
_WORLD = re.compile(
    r"\b(?:world[_ ]?size|nranks|nRanks|WORLD_SIZE)['\"]?\s*[=: ]\s*(?P<world>\d{1,6})\b|\d+/(?P<clients>\d+) "
    r"clients joined"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveVerdict:
    """Conclusion from the reports of all ranks' watchdogs."""

    kind: str
    """mismatch, behind, silent or unfinished"""
    ranks: tuple[int, ...]
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOutCollective:
    """Collective in which a rank has timed out."""

    group: str
    number: int
    op: str
    size: str

    @property
    def call_text(self) -> str:
        """Return the operation and its size, such as `ALLREDUCE of 112 elements`."""
        return f"{self.op} of {self.size} elements" if self.size and self.op in _FIXED_SIZE else self.op


@dataclass(slots=True)
class WatchdogReports:
    """Reports of all watchdogs."""

    calls: dict[int, TimedOutCollective]
    enqueued: dict[str, dict[int, int]]
    lagging: tuple[int, ...] = ()

    @property
    def timed_out_call(self) -> str:
        """Return the collective that timed out, if all reports agree; empty otherwise."""
        said = {(call.number, call.call_text) for call in self.calls.values()}
        if len(said) != 1:
            return ""
        number, what = next(iter(said))
        return f"collective {number}, {what}" if number >= 0 else what

    @property
    def diverging_ranks(self) -> tuple[tuple[int, ...], str] | None:
        """Return the smaller group of ranks and a description, if ranks wait in different collectives."""
        sides: dict[tuple[int, str], list[int]] = {}
        if len({call.group for call in self.calls.values()}) > 1:
            return None
        for rank, call in self.calls.items():
            sides.setdefault((call.number, call.call_text), []).append(rank)
        if len(sides) < 2:
            return None
        told = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))} in collective {number}, {what}"
            for (number, what), ranks in sorted(sides.items(), key=lambda side: len(side[1]))[:4]
        )
        fewest = min(sides.values(), key=len)
        return (tuple(sorted(fewest)) if len(fewest) < len(self.calls) / 2 else ()), told


def rank_in(line: LogLine) -> int | None:
    """Return the rank whose watchdog printed a line."""
    if line.rank is not None:
        return line.rank
    found = _SPOKEN_RANK.search(line.raw)
    return int(found["rank"] or found["named"]) if found else None


def world_in(text: str) -> int:
    """Return the number of ranks in a line; 0 if the line has none."""
    found = _WORLD.search(text)
    return int(found["world"] or found["clients"]) if found else 0


def collect_watchdog_reports(lines: Iterable[LogLine]) -> WatchdogReports:
    """Return the reports in the lines of watchdogs as a table."""
    table = WatchdogReports(calls={}, enqueued={})
    for line in lines:
        if found := _LAGGING.search(line.text):
            table.lagging = tuple(int(word) for word in re.findall(r"\d+", found["ranks"] or found["more"]))
        rank = rank_in(line)
        if rank is None:
            continue
        group = _GROUP.search(line.raw)
        name = group["group"] if group else ""
        if found := _TIMEOUT.search(line.text):
            size = found["numel"] or (found["shape"] or "").replace(" ", "")
            table.calls.setdefault(
                rank, TimedOutCollective(group=name, number=int(found["seq"] or -1), op=found["op"], size=size)
            )
        if found := _LAST.search(line.text):
            table.enqueued.setdefault(name, {}).setdefault(rank, int(found["enqueued"]))
    return table


def diagnose_collective_timeout(table: WatchdogReports, ranks: set[int], world: int = 0) -> CollectiveVerdict | None:
    """Return the ranks that caused the timeout of a collective; None if the logs do not show it.

    Args:
        table: the reports of the watchdogs of all ranks.
        ranks: all ranks of the job that have printed anything, or that are in its plan.
        world: number of ranks of the job; 0 if the logs do not show it.
    """
    if table.lagging:
        return CollectiveVerdict(
            kind="behind", ranks=table.lagging, said="torch's own analysis names this rank as the slow one"
        )
    if len(table.calls) < 2:
        return None
    return (
        _find_call_mismatch(table.calls)
        or _find_ranks_behind(table)
        or _find_silent_ranks(table, ranks, world)
        or _find_unfinished_collective(table, world)
    )


def _find_call_mismatch(calls: dict[int, TimedOutCollective]) -> CollectiveVerdict | None:
    for number in sorted({call.number for call in calls.values() if call.number >= 0}):
        said = {rank: call.call_text for rank, call in calls.items() if call.number == number}
        if len({call.group for call in calls.values() if call.number == number}) > 1:
            continue
        counted = Counter(said.values()).most_common()
        if len(counted) < 2:
            continue
        most = counted[0]
        tied = most[1] == counted[1][1]
        odd = sorted(rank for rank, call in said.items() if tied or call != most[0])
        told = "; ".join(
            f"rank {rank} called {said[rank]}" for rank in (odd if tied else [*odd, *_find_first_caller(said, most[0])])
        )
        return CollectiveVerdict(kind="mismatch", ranks=tuple(odd), said=f"at collective {number}, {told}")
    return None


def _find_first_caller(calls: dict[int, str], call: str) -> list[int]:
    return [min(rank for rank, called in calls.items() if called == call)]


def _find_ranks_behind(table: WatchdogReports) -> CollectiveVerdict | None:
    counts = [counted for counted in table.enqueued.values() if len(counted) > 1]
    by_group: dict[str, dict[int, int]] = {}
    for rank, call in table.calls.items():
        if call.number >= 0:
            by_group.setdefault(call.group, {})[rank] = call.number
    counts += [counted for counted in by_group.values() if len(counted) > 1]
    for counted in counts:
        low, high = min(counted.values()), max(counted.values())
        late = sorted(rank for rank, number in counted.items() if number == low)
        if low < high and len(late) <= len(counted) / 2:
            return CollectiveVerdict(
                kind="behind", ranks=tuple(late), said=f"it was at collective {low} when other ranks were at {high}"
            )
    return None


def _find_silent_ranks(table: WatchdogReports, ranks: set[int], world: int) -> CollectiveVerdict | None:
    if world and len(ranks) < world:  # the logs of some ranks are missing, so a missing report means nothing
        return None
    spoken = set(table.calls).union(*table.enqueued.values())
    silent = sorted(ranks - spoken)
    if silent and len(silent) <= len(ranks) / 2:
        return CollectiveVerdict(
            kind="silent", ranks=tuple(silent), said="all other ranks waited for it, and it did not time out itself"
        )
    return None


def _find_unfinished_collective(table: WatchdogReports, world: int) -> CollectiveVerdict | None:
    """Return a verdict if all ranks of the job wait in one collective; None if the logs of some ranks are missing."""
    if not world or len(table.calls) < world or not table.timed_out_call:
        return None
    return CollectiveVerdict(kind="unfinished", ranks=(), said=f"all {world} ranks waited in {table.timed_out_call}")
