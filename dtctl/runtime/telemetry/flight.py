"""Last collectives of this worker, as torch's flight recorders have them, to explain why a run makes no progress.

torch has two: NCCL's own, in builds for GPUs, and one for the others, which on GPUs has only the small exchanges of the
control flow over gloo.
"""

from __future__ import annotations

import json
from typing import Any, Final

ENTRIES: Final = 200
"""Newest entries of each recorder; they explain what hangs, and 2000 would be a megabyte."""
MAX_BYTES: Final = 1 << 17
"""Bytes of an answer; the supervisor takes twice as much."""


def dump() -> bytes:
    """Return JSON in the form of torch's dumps, with `gloo` next to NCCL's if both exist; empty if torch has none."""
    from torch._C import _distributed_c10d as c10d

    traces = [_taken(getattr(c10d, name, None)) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    nccl, other = traces
    if not nccl.get("entries"):
        return _short(other) if other else b""
    return _short({**nccl, "gloo": other} if other else nccl)


def _taken(recorder: Any) -> dict[str, Any]:
    if recorder is None:  # a build without NCCL, or torch before 2.8
        return {}
    trace: dict[str, Any] = json.loads(recorder(True, False))
    return trace


def _short(whole: dict[str, Any]) -> bytes:
    """Return as many of the newest entries as fit; the recorders have the oldest first."""
    kept = ENTRIES
    while True:
        cut = _newest(whole, kept)
        if "gloo" in cut:
            cut["gloo"] = _newest(cut["gloo"], kept)
        text = json.dumps(cut, separators=(",", ":")).encode()
        if len(text) <= MAX_BYTES or kept == 1:
            return text
        kept //= 2


def _newest(record: dict[str, Any], count: int) -> dict[str, Any]:
    return {**record, "entries": record.get("entries", [])[-count:]}
