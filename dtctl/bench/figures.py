"""Figures of a benchmark: sizes, algorithm and bus bandwidth as nccl-tests defines them, rows of the table. Pure.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and src/gather.cu and scatter.cu for those
two. A size is that of the larger side of the operation: of all ranks' parts together where each rank has a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtctl.errors import UsageError


def _compute_peer_share(ranks: int) -> float:
    return (ranks - 1) / ranks


BUS_FACTOR: Mapping[str, Callable[[int], float]] = {
    "p2p": lambda _: 1.0,
    "reduce": lambda _: 1.0,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "scatter": _compute_peer_share,
    "gather": _compute_peer_share,
    "broadcast": lambda _: 1.0,
    "all_gather": _compute_peer_share,
    "reduce_scatter": _compute_peer_share,
    "all_to_all": _compute_peer_share,
}
"""operation -> what its algorithm bandwidth is multiplied with, given the number of ranks"""
OPS = tuple(BUS_FACTOR)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
DEFAULT_SIZES = "4K:16M"
STEP = 4
WORD = 4
"""Bytes of a float32, the type of all buffers."""


def parse_operations(names: Sequence[str]) -> tuple[str, ...]:
    """Return the operations of these names, or all if none is given; `all-reduce` and `allreduce` mean `all_reduce`.

    Raises:
        UsageError: there is no such operation.
    """
    by_name = {name.replace("_", ""): name for name in OPS}
    selected = []
    for name in names:
        plain = name.lower().replace("-", "").replace("_", "")
        if plain not in by_name:
            raise UsageError(f"there is no operation {name!r}", where="--op", hint=f"choose one of {', '.join(OPS)}")
        selected.append(by_name[plain])
    return tuple(dict.fromkeys(selected)) or OPS


def parse_message_size(text: str) -> int:
    """Return the bytes of `64`, `4K`, `16M` or `1G`.

    Raises:
        UsageError: the text is not a size.
    """
    plain = text.strip().upper().removesuffix("IB").removesuffix("B")
    number, unit = (plain[:-1], plain[-1:]) if plain[-1:].isalpha() else (plain, "")
    if not number.isdigit() or unit not in _UNITS:
        raise UsageError(f"{text!r} is not a size", where="--sizes", hint="write 4K:16M, or one size such as 1M")
    return int(number) * _UNITS[unit]


def parse_size_range(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes of `A:B`, each four times the one before and the last one B; or of one size.

    Raises:
        UsageError: the text is not a range of sizes.
    """
    first, _, last = text.partition(":")
    low, high = parse_message_size(first), parse_message_size(last or first)
    if not WORD <= low <= high:
        raise UsageError(f"{text!r} is not a range of sizes", where="--sizes", hint=f"from {WORD} bytes up: 4K:16M")
    sizes = [low]
    while sizes[-1] * STEP < high:
        sizes.append(sizes[-1] * STEP)
    return (*sizes, high) if high > low else (low,)


def format_message_size(size: int) -> str:
    """Return `16 MiB`; the size in bytes if it is not a whole number of a larger unit."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def build_result_row(op: str, size: int, seconds: float, *, ranks: int, wrong: int) -> dict[str, Any]:
    """Return a row: `op`, `size` (bytes), `time_us`, `algbw_gb_s`, `busbw_gb_s` (1e9 bytes a second), `wrong` elements.

    Args:
        op: the operation.
        size: bytes, as the head of this file defines it.
        seconds: how long one operation takes.
        ranks: workers that take part; 2 for p2p.
        wrong: number of wrong elements on all ranks.
    """
    algorithm = size / seconds / 1e9 if seconds > 0 else 0.0
    return {
        "op": op,
        "size": size,
        "time_us": round(seconds * 1e6, 2),
        "algbw_gb_s": round(algorithm, 5),
        "busbw_gb_s": round(algorithm * BUS_FACTOR[op](ranks), 5),
        "wrong": wrong,
    }


def build_training_row(workers: int, step_s: float, one_s: float, *, loss_ok: bool) -> dict[str, Any]:
    """`workers`, `step_s`, `efficiency`: the same work per worker should take the same time on any number of them."""
    return {
        "workers": workers,
        "step_s": round(step_s, 6),
        "efficiency": round(one_s / step_s, 4) if step_s > 0 else 0.0,
        "ok": loss_ok,
    }
