"""Last collectives of this worker from torch's flight recorders, to explain why a run makes no progress.

torch has two recorders: NCCL's own, in builds for GPUs, and one for the other back ends, which on GPUs contains only
the small exchanges of the control flow over gloo.
"""

from __future__ import annotations

import json
from typing import Any, Final

ENTRIES: Final = 200
"""Number of the newest entries of each recorder; they explain a hang, and 2000 would take a megabyte."""
MAX_BYTES: Final = 1 << 17
"""Largest size of the result; the supervisor accepts twice as much."""


def dump_flight_recorder() -> bytes:
    """Return JSON in the form of torch's dumps; empty if torch has no recorder.

    If both recorders exist, a key `gloo` is added to NCCL's dump.
    """
    from torch._C import _distributed_c10d as c10d

    traces = [
        _read_recorder_trace(getattr(c10d, name, None)) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    ]
    nccl, other = traces
    if not nccl.get("entries"):
        return _encode_newest_entries(other) if other else b""
    return _encode_newest_entries({**nccl, "gloo": other} if other else nccl)


def _read_recorder_trace(recorder: Any) -> dict[str, Any]:
    if recorder is None:  # a build without NCCL, or a version of torch before 2.8
        return {}
    trace: dict[str, Any] = json.loads(recorder(True, False))
    return trace


def _encode_newest_entries(whole: dict[str, Any]) -> bytes:
    """Return as many of the newest entries as fit; the recorders list the oldest first."""
    kept = ENTRIES
    while True:
        cut = _keep_newest_entries(whole, kept)
        if "gloo" in cut:
            cut["gloo"] = _keep_newest_entries(cut["gloo"], kept)
        text = json.dumps(cut, separators=(",", ":")).encode()
        if len(text) <= MAX_BYTES or kept == 1:
            return text
        kept //= 2


def _keep_newest_entries(record: dict[str, Any], count: int) -> dict[str, Any]:
    return {**record, "entries": record.get("entries", [])[-count:]}
