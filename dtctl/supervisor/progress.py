"""How far the workers of a node are: small files that they write from their own memory, read from outside.

A worker maps one file and changes numbers in it (see dtctl/runtime/progress.py); nothing has to run in it for them to
be read, so that a worker that is stopped, stuck or dead can be seen to stand still. Stdlib only, Python 3.8.
"""

from __future__ import annotations

import os
import struct
import time

from dtctl import node_facts

FIELDS = (
    "pid", "signal", "phase", "step", "place", "noted_ns", "first", "begun_ns", "slowest_ns", "stall_ns",
    "evaluation_ns", "saved", "until",
)  # fmt: skip
RECORD = struct.Struct(f"@8s{len(FIELDS)}Q")
MAGIC = b"dtctl-p2"


def read(folder: str) -> list:  # type: ignore[type-arg]
    """What each worker that tells its progress has noted last, as `facts` has it; in no particular order."""
    try:
        found = os.listdir(folder)
    except OSError:
        return []
    told = []
    for name in found:
        if name.startswith("rank-") and name[5:].isdigit():
            try:
                with open(os.path.join(folder, name), "rb") as file:
                    data = file.read(RECORD.size)
            except OSError:
                continue
            if len(data) == RECORD.size and data[:8] == MAGIC:
                told.append(facts(int(name[5:]), RECORD.unpack(data)[1:], time.monotonic_ns()))
    return told


def facts(rank: int, numbers: tuple, now_ns: int) -> dict:  # type: ignore[type-arg]
    """A worker's record for the control machine; clocks are the node's, so times are sent as ages in seconds."""
    told = dict(zip(FIELDS, numbers))  # noqa: B905 - `strict` is newer than Python 3.8
    return {
        "rank": rank,
        "pid": told["pid"],
        "signal": told["signal"],
        "phase": told["phase"],
        "step": told["step"],
        "place": told["place"],
        "first": told["first"],
        "saved": told["saved"],
        "until": told["until"],
        "begun_s": max(0, now_ns - told["begun_ns"]) / 1e9,
        "stale_s": max(0, now_ns - told["noted_ns"]) / 1e9,
        "slowest_s": told["slowest_ns"] / 1e9,
        "stall_s": told["stall_ns"] / 1e9,
        "evaluation_s": told["evaluation_ns"] / 1e9,
        "state": node_facts.state(told["pid"]),
    }
