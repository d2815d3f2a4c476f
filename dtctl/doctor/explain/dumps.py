"""Flight-recorder dumps of torch, which show the rank that was late or in another call when a collective timed out.

torch writes one file per rank (`TORCH_FR_DUMP_TEMP_FILE`, by default `..._trace_rank_N`): a pickle, and JSON on
request. Loading a pickle can run any program, so only plain containers, numbers and texts are loaded: a pickle that
names a class or a function is refused, and the file is skipped. Dumps of torch do not contain any.

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
"""Limit on the characters of a name, and on the tensors of a collective."""


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that loads only containers, numbers and texts."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it refers to {pid!r}, which is outside of the dump")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """Collective that a rank has entered."""

    op: str
    sizes: str
    done: bool
    where: str
    """File and line of the program, if the dump has stack traces."""

    @property
    def collective_text(self) -> str:
        """Return operation and sizes as text, such as `all_reduce of [[4]]`."""
        return f"{self.op} of {self.sizes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecorderDump:
    """Flight record of one rank: group -> number of the collective -> call; and the groups' ranks."""

    file: str
    rank: int
    calls: Mapping[str, Mapping[int, CollectiveCall]]
    members: Mapping[str, tuple[int, ...]]

    @property
    def last(self) -> str:
        """Return the last collective of the rank in each group, as text."""
        told = []
        for group, calls in self.calls.items():
            number = max(calls)
            state = "finished" if calls[number].done else "waiting"
            told.append(f"group {group}: collective {number}, {_describe_collective_call(calls[number])}, {state}")
        return "; ".join(told) or "no collective at all"


def is_dump(path: Path) -> bool:
    """Return whether the file has the name of a dump."""
    return NAME.search(path.name) is not None


def read_dump(path: Path) -> FlightRecorderDump | None:
    """Return the dump in a file; None if the file has no dump, or has more than plain data."""
    named = NAME.search(path.name)
    try:
        if named is None or path.stat().st_size > MAX_BYTES:
            return None
        raw = folders.read_regular(str(path), MAX_BYTES)
        data = json.loads(raw) if raw[:1] == b"{" else _unpickle_plain_data(raw)
        return _parse_dump(data, str(path), int(named["rank"]))
    except (OSError, ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError):
        return None
    except (pickle.UnpicklingError, RecursionError, MemoryError):
        return None


def _unpickle_plain_data(raw: bytes) -> Any:
    """Return the content of a pickle of plain data, whose memory is limited by the length of the pickle."""
    for op, argument, _ in pickletools.genops(raw):
        if op.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(raw):
            raise pickle.UnpicklingError("it counts more entries than it has")
    return _PlainUnpickler(io.BytesIO(raw)).load()


def _parse_dump(data: Mapping[str, Any], file: str, rank: int) -> FlightRecorderDump:
    calls: dict[str, dict[int, CollectiveCall]] = {}
    for entry in data["entries"]:
        if entry.get("is_p2p"):
            continue
        group, name = _parse_dump_name(entry["process_group"][0]), _parse_dump_name(entry["profiling_name"])
        op = name.partition(":")[2] or name
        calls.setdefault(group, {})[int(entry["collective_seq_id"])] = CollectiveCall(
            op=op,
            sizes=_format_input_sizes(entry.get("input_sizes", [])),
            done=bool(entry.get("retired")) or entry.get("state") == "completed",
            where=_find_user_frame(entry.get("frames") or ()),
        )
    members = {
        _parse_dump_name(config.get("name") or key): _parse_group_ranks(config["ranks"])
        for key, config in data.get("pg_config", {}).items()
    }
    return FlightRecorderDump(file=file, rank=rank, calls=calls, members=members)


def _parse_dump_name(value: object) -> str:
    """Return a short name or number; other values are an error.

    The content of a pickle can be larger than the pickle: references to one list become many lists in text.
    """
    if not isinstance(value, str | int) or (isinstance(value, str) and len(value) > MAX_WORD):
        raise ValueError("no name")
    return str(value)


def _format_input_sizes(value: object) -> str:
    if not isinstance(value, list | tuple) or len(value) > MAX_WORD:
        raise TypeError("no sizes")
    if not all(isinstance(one, list | tuple) and len(one) < 64 and all(type(n) is int for n in one) for one in value):
        raise TypeError("no sizes")
    return json.dumps(value)


def _parse_group_ranks(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        return tuple(int(word) for word in re.findall(r"\d{1,9}", value))
    if not isinstance(value, list | tuple) or not all(type(rank) is int for rank in value):
        raise TypeError("no ranks")
    return tuple(value)


def _find_user_frame(frames: Iterable[Mapping[str, Any]]) -> str:
    for frame in frames:
        name = _parse_dump_name(frame.get("filename", ""))
        if name and "/torch/" not in name and not name.startswith("<"):
            return f"{name}:{_parse_dump_name(frame.get('line', '?'))}"
    return ""


def judge_dumps(dumps: Iterable[FlightRecorderDump]) -> CollectiveVerdict | None:
    """Return a verdict about late ranks; None with fewer than two dumps or without a difference."""
    by_rank = {dump.rank: dump for dump in dumps}
    if len(by_rank) < 2:
        return None
    groups = dict.fromkeys(group for dump in by_rank.values() for group in dump.calls)
    for group in groups:
        entered = {rank: dump.calls[group] for rank, dump in by_rank.items() if group in dump.calls}
        found = (
            _find_dump_mismatch(entered)
            or _find_dump_ranks_behind(entered)
            or _find_missing_dumps(entered, by_rank, group)
        )
        if found is not None:
            return found
    return None


def _find_dump_mismatch(entered: Mapping[int, Mapping[int, CollectiveCall]]) -> CollectiveVerdict | None:
    for number in sorted({number for calls in entered.values() for number in calls}):
        said = {rank: calls[number] for rank, calls in entered.items() if number in calls}
        counted = Counter(
            call.collective_text if call.op == "all_reduce" else call.op for call in said.values()
        ).most_common()
        if len(counted) < 2:
            continue
        tied = counted[0][1] == counted[1][1]
        odd = sorted(
            rank
            for rank, call in said.items()
            if tied or (call.collective_text if call.op == "all_reduce" else call.op) != counted[0][0]
        )
        others = [] if tied else [min(rank for rank in said if rank not in odd)]
        told = "; ".join(f"rank {rank} called {_describe_collective_call(said[rank])}" for rank in (*odd, *others))
        return CollectiveVerdict(kind="mismatch", ranks=tuple(odd), said=f"at collective {number}, {told}")
    return None


def _find_dump_ranks_behind(entered: Mapping[int, Mapping[int, CollectiveCall]]) -> CollectiveVerdict | None:
    last = {rank: max(calls) for rank, calls in entered.items()}
    low, high = min(last.values()), max(last.values())
    late = tuple(sorted(rank for rank, number in last.items() if number == low))
    if low == high:
        return None
    waiting = next(calls[high] for rank, calls in entered.items() if last[rank] == high)
    said = f"it had entered {low} collectives when others were in number {high}, {_describe_collective_call(waiting)}"
    return CollectiveVerdict(kind="behind", ranks=late, said=said)


def _find_missing_dumps(
    entered: Mapping[int, Mapping[int, CollectiveCall]], dumps: Mapping[int, FlightRecorderDump], group: str
) -> CollectiveVerdict | None:
    known = {rank for dump in dumps.values() for rank in dump.members.get(group, dump.members.get("", ()))}
    silent = tuple(sorted(known - set(entered)))
    unfinished = any(not call.done for calls in entered.values() for call in calls.values())
    if silent and unfinished and len(silent) <= len(known) / 2:
        return CollectiveVerdict(kind="silent", ranks=silent, said="it has left no dump, and the others were waiting")
    return None


def _describe_collective_call(call: CollectiveCall) -> str:
    return call.collective_text + (f" at {call.where}" if call.where else "")
