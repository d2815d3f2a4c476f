"""Which rank kept the others waiting in a collective, from what the watchdogs of all ranks have printed. Pure.

Every rank counts its collectives. If the counts of the ranks that gave up differ, the one with the lowest is late; if
one has not given up at all, it is the one that they waited for; if they gave up on different operations of the same
number, the program calls them in different order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dtctl.doctor.explain.lines import LogLine

_TIMEOUT = re.compile(r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+))?")
_LAST = re.compile(
    r"last enqueued (?:NCCL )?work: (?P<enqueued>\d+), last completed (?:NCCL )?work: (?P<completed>\d+)"
)
_GROUP = re.compile(r"\[PG (?:ID )?(?P<group>\d+)")
_FIXED_SIZE = ("ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE")
"""Operations in which every rank brings as many numbers as the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveVerdict:
    """What the watchdogs agree upon."""

    kind: str
    """mismatch, behind or silent"""
    ranks: tuple[int, ...]
    said: str


def judge(lines: Iterable[LogLine], ranks: set[int]) -> CollectiveVerdict | None:
    """Who is to blame for a collective that timed out; None when the texts do not tell.

    Args:
        lines: the lines of all ranks in which a watchdog speaks.
        ranks: all ranks of the job that are known.
    """
    timeouts: dict[int, tuple[int, str, int]] = {}
    enqueued: dict[str, dict[int, int]] = {}
    for line in lines:
        if line.rank is None:
            continue
        if found := _TIMEOUT.search(line.text):
            timeouts.setdefault(line.rank, (int(found["seq"]), found["op"], int(found["numel"] or -1)))
        if found := _LAST.search(line.text):
            group = _GROUP.search(line.raw)
            enqueued.setdefault(group["group"] if group else "", {}).setdefault(line.rank, int(found["enqueued"]))
    if len(timeouts) < 2:
        return _silent(timeouts, ranks)
    return _mismatch(timeouts) or _behind(timeouts, enqueued) or _silent(timeouts, ranks)


def _mismatch(timeouts: dict[int, tuple[int, str, int]]) -> CollectiveVerdict | None:
    for number in sorted({seq for seq, _, _ in timeouts.values()}):
        calls = {
            rank: f"{op} of {numel} elements" if op in _FIXED_SIZE and numel >= 0 else op
            for rank, (seq, op, numel) in timeouts.items()
            if seq == number
        }
        counted = Counter(calls.values()).most_common()
        if len(counted) < 2:
            continue
        most = counted[0]
        tied = most[1] == counted[1][1]
        odd = sorted(rank for rank, call in calls.items() if tied or call != most[0])
        said = "; ".join(
            f"rank {rank} called {calls[rank]}" for rank in (odd if tied else [*odd, *_one(calls, most[0])])
        )
        return CollectiveVerdict(kind="mismatch", ranks=tuple(odd), said=f"at collective {number}, {said}")
    return None


def _one(calls: dict[int, str], call: str) -> list[int]:
    return [min(rank for rank, called in calls.items() if called == call)]


def _behind(timeouts: dict[int, tuple[int, str, int]], enqueued: dict[str, dict[int, int]]) -> CollectiveVerdict | None:
    counts = [counted for counted in enqueued.values() if len(counted) > 1]
    counts.append({rank: seq for rank, (seq, _, _) in timeouts.items()})
    for counted in counts:
        low, high = min(counted.values()), max(counted.values())
        late = sorted(rank for rank, number in counted.items() if number == low)
        if low < high and len(late) <= len(counted) / 2:
            return CollectiveVerdict(
                kind="behind", ranks=tuple(late), said=f"it was at collective {low} when others were at {high}"
            )
    return None


def _silent(timeouts: dict[int, tuple[int, str, int]], ranks: set[int]) -> CollectiveVerdict | None:
    silent = sorted(ranks - set(timeouts))
    if timeouts and silent and len(silent) <= len(ranks) / 2:
        return CollectiveVerdict(
            kind="silent", ranks=tuple(silent), said="all others waited for it, and it never gave up itself"
        )
    return None
