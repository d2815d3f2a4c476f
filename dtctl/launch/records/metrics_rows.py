"""Rows of a run's metrics.jsonl, one for each step that rank 0 has logged."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from dtctl import folders

TAIL_BYTES = 1 << 16


def is_number(value: Any) -> bool:
    """Return whether a value is a number that can be used as a time or plotted."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # An integer of hundreds of digits raises this error.
        return False


def parse_row(line: bytes | str) -> dict[str, Any] | None:
    """Parse a line; return None if it is incomplete or has no step. Names that cannot be printed are left out."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not is_number(row.get("step")):
        return None
    try:
        "".join(row).encode()
    except UnicodeEncodeError:  # The name has half a surrogate pair.
        return {name: value for name, value in row.items() if name.isprintable()}
    return row


def read_last_rows(path: Path) -> list[dict[str, Any]]:
    """Read the last rows, oldest first; empty if there are none yet. An incomplete last line does not count."""
    try:
        with os.fdopen(folders.open_regular(str(path)), "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[1 if size > TAIL_BYTES else 0 : -1]
    except OSError:
        return []
    return [row for row in map(parse_row, lines) if row is not None]


def read_last_step(path: Path) -> int | None:
    """Read the last step that rank 0 has logged; None if it has logged none."""
    rows = read_last_rows(path)
    return int(rows[-1]["step"]) if rows else None
