"""Applying edits to files."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from dtctl.lint.model import Problem
from dtctl.lint.source import is_python


def fixed_text(text: str, problems: Sequence[Problem]) -> tuple[str, list[Problem]]:
    """A text with the edits of some problems applied, and the problems that this mends.

    A problem whose edits lie in the way of an earlier one's is left for the next run. Edits that several problems share
    are made once.
    """
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()) + 1)
    raw = text.encode()
    taken: dict[tuple[int, int], set[str]] = {}
    mended = []
    for problem in problems:
        if not problem.edits:
            continue
        spans = [
            (starts[edit.start[0] - 1] + edit.start[1], starts[edit.end[0] - 1] + edit.end[1], edit.text)
            for edit in problem.edits
        ]
        if any(_clashes(begin, end, new, taken) for begin, end, new in spans):
            continue
        for begin, end, new in spans:
            taken.setdefault((begin, end), set()).add(new)
        mended.append(problem)
    for (begin, end), texts in sorted(taken.items(), reverse=True):
        raw = raw[:begin] + "".join(sorted(texts)).encode() + raw[end:]
    return raw.decode(), mended


def _clashes(begin: int, end: int, new: str, taken: dict[tuple[int, int], set[str]]) -> bool:
    """Whether an edit changes what another one changes, in another way."""
    for (other_begin, other_end), texts in taken.items():
        same = (begin, end) == (other_begin, other_end)
        if same and (new in texts):
            continue
        if same and begin == end and new.endswith("\n"):  # two imports at one place
            continue
        if same or (begin < other_end and other_begin < end):
            return True
    return False


def apply(path: Path, problems: Sequence[Problem]) -> list[Problem]:
    """Mend a file in place; the problems that were mended. The file is replaced whole, or not at all."""
    before = path.read_bytes().decode("utf-8-sig")
    after, mended = fixed_text(before, problems)
    if not mended or after == before:
        return []
    if is_python(path):
        ast.parse(after)  # a mistake of ours must not reach the file
    temporary = path.with_name(f".{path.name}.dtctl-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(path.stat().st_mode & 0o777)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return mended
