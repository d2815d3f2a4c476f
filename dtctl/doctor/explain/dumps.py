"""Flight-recorder dumps of torch: which rank had not entered, or entered something else, when a collective timed out.

torch writes one file per rank (`TORCH_FR_DUMP_TEMP_FILE`, by default `..._trace_rank_N`): a pickle, and JSON on
request. A pickle can run any program when it is read, so only plain containers, numbers and texts are taken from it:
whatever names a class or a function is refused, and the file is passed over. Dumps of torch hold nothing of the kind.

Sources: torch/distributed/flight_recorder/ and FlightRecorder.hpp of torch 2.13 (format 2.10).
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtctl import folders
from dtctl.doctor.explain.collective import CollectiveVerdict

NAME = re.compile(r"trace_rank_?(?P<rank>\d+)(?:\.json|\.pickle|\.pkl)?\Z")
MAX_BYTES = 512 << 20
MAX_WORD = 4096
"""Characters of a name, and tensors of a collective."""


class _Plain(pickle.Unpickler):
    """Reads containers, numbers and texts, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it refers to {pid!r}, which is somewhere else")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective that a rank has entered."""

    op: str
    sizes: str
    done: bool
    where: str
    """File and line of the program, when the dump has stack traces."""

    @property
    def said(self) -> str:
        """`all_reduce of [[4]]`."""
        return f"{self.op} of {self.sizes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Flight record of one rank: group -> number of the collective -> call; and the groups' ranks."""

    file: str
    rank: int
    calls: Mapping[str, Mapping[int, CollectiveCall]]
    members: Mapping[str, tuple[int, ...]]

    @property
    def last(self) -> str:
        """Return what the rank was doing: the last collective of each group."""
        told = []
        for group, calls in self.calls.items():
            number = max(calls)
            state = "finished" if calls[number].done else "waiting"
            told.append(f"group {group}: collective {number}, {_told(calls[number])}, {state}")
        return "; ".join(told) or "no collective at all"


def is_dump(path: Path) -> bool:
    """Return whether the file is called like a dump."""
    return NAME.search(path.name) is not None


def read_dump(path: Path) -> Dump | None:
    """Return the dump in a file; None when it holds none, or anything but plain data."""
    named = NAME.search(path.name)
    try:
        if named is None or path.stat().st_size > MAX_BYTES:
            return None
        raw = folders.read_regular(str(path), MAX_BYTES)
        data = json.loads(raw) if raw[:1] == b"{" else _unpickled(raw)
        return _dump(data, str(path), int(named["rank"]))
    except (OSError, ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError):
        return None
    except (pickle.UnpicklingError, RecursionError, MemoryError):
        return None


def _unpickled(raw: bytes) -> Any:
    """Return the content of a pickle of plain data. It allocates no more memory than its own length explains."""
    for op, argument, _ in pickletools.genops(raw):
        if op.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(raw):
            raise pickle.UnpicklingError("it numbers more than it has")
    return _Plain(io.BytesIO(raw)).load()


def _dump(data: Mapping[str, Any], file: str, rank: int) -> Dump:
    calls: dict[str, dict[int, CollectiveCall]] = {}
    for entry in data["entries"]:
        if entry.get("is_p2p"):
            continue
        group, name = _word(entry["process_group"][0]), _word(entry["profiling_name"])
        op = name.partition(":")[2] or name
        calls.setdefault(group, {})[int(entry["collective_seq_id"])] = CollectiveCall(
            op=op,
            sizes=_sizes(entry.get("input_sizes", [])),
            done=bool(entry.get("retired")) or entry.get("state") == "completed",
            where=_where(entry.get("frames") or ()),
        )
    members = {
        _word(config.get("name") or key): _ranks(config["ranks"]) for key, config in data.get("pg_config", {}).items()
    }
    return Dump(file=file, rank=rank, calls=calls, members=members)


def _word(value: object) -> str:
    """Return a name or a number.

    What a pickle has can be larger than the pickle: lists of one list are many lists in text.
    """
    if not isinstance(value, str | int) or (isinstance(value, str) and len(value) > MAX_WORD):
        raise ValueError("no name")
    return str(value)


def _sizes(value: object) -> str:
    if not isinstance(value, list | tuple) or len(value) > MAX_WORD:
        raise TypeError("no sizes")
    if not all(isinstance(one, list | tuple) and len(one) < 64 and all(type(n) is int for n in one) for one in value):
        raise TypeError("no sizes")
    return json.dumps(value)


def _ranks(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        return tuple(int(word) for word in re.findall(r"\d{1,9}", value))
    if not isinstance(value, list | tuple) or not all(type(rank) is int for rank in value):
        raise TypeError("no ranks")
    return tuple(value)


def _where(frames: Iterable[Mapping[str, Any]]) -> str:
    for frame in frames:
        name = _word(frame.get("filename", ""))
        if name and "/torch/" not in name and not name.startswith("<"):
            return f"{name}:{_word(frame.get('line', '?'))}"
    return ""


def judge_dumps(dumps: Iterable[Dump]) -> CollectiveVerdict | None:
    """Return the rank that is late; None with fewer than two dumps, or if all ranks entered the same collectives."""
    by_rank = {dump.rank: dump for dump in dumps}
    if len(by_rank) < 2:
        return None
    groups = dict.fromkeys(group for dump in by_rank.values() for group in dump.calls)
    for group in groups:
        entered = {rank: dump.calls[group] for rank, dump in by_rank.items() if group in dump.calls}
        found = _mismatch(entered) or _behind(entered) or _missing(entered, by_rank, group)
        if found is not None:
            return found
    return None


def _mismatch(entered: Mapping[int, Mapping[int, CollectiveCall]]) -> CollectiveVerdict | None:
    for number in sorted({number for calls in entered.values() for number in calls}):
        said = {rank: calls[number] for rank, calls in entered.items() if number in calls}
        counted = Counter(call.said if call.op == "all_reduce" else call.op for call in said.values()).most_common()
        if len(counted) < 2:
            continue
        tied = counted[0][1] == counted[1][1]
        odd = sorted(
            rank
            for rank, call in said.items()
            if tied or (call.said if call.op == "all_reduce" else call.op) != counted[0][0]
        )
        others = [] if tied else [min(rank for rank in said if rank not in odd)]
        told = "; ".join(f"rank {rank} called {_told(said[rank])}" for rank in (*odd, *others))
        return CollectiveVerdict(kind="mismatch", ranks=tuple(odd), said=f"at collective {number}, {told}")
    return None


def _behind(entered: Mapping[int, Mapping[int, CollectiveCall]]) -> CollectiveVerdict | None:
    last = {rank: max(calls) for rank, calls in entered.items()}
    low, high = min(last.values()), max(last.values())
    late = tuple(sorted(rank for rank, number in last.items() if number == low))
    if low == high:
        return None
    waiting = next(calls[high] for rank, calls in entered.items() if last[rank] == high)
    said = f"it had entered {low} collectives when others were in number {high}, {_told(waiting)}"
    return CollectiveVerdict(kind="behind", ranks=late, said=said)


def _missing(
    entered: Mapping[int, Mapping[int, CollectiveCall]], dumps: Mapping[int, Dump], group: str
) -> CollectiveVerdict | None:
    known = {rank for dump in dumps.values() for rank in dump.members.get(group, dump.members.get("", ()))}
    silent = tuple(sorted(known - set(entered)))
    unfinished = any(not call.done for calls in entered.values() for call in calls.values())
    if silent and unfinished and len(silent) <= len(known) / 2:
        return CollectiveVerdict(kind="silent", ranks=silent, said="it has left no dump, and the others were waiting")
    return None


def _told(call: CollectiveCall) -> str:
    return call.said + (f" at {call.where}" if call.where else "")
