"""Files that a program did not find on its node and that lie here, where a rule kept them from being pushed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dtctl.launch.files import left_out
from dtctl.spec.model import Spec

_NOT_FOUND = (
    re.compile(r"No such file or directory: b?(?P<quote>['\"])(?P<path>.+?)(?P=quote)"),
    re.compile(r"can't open file (?P<quote>['\"])(?P<path>.+?)(?P=quote)"),
    re.compile(r"(?:^|[\s:'\"])(?P<path>[^\s:'\"]+)['\"]?: No such file or directory"),
    re.compile(r"(?i)(?:no such file|not found|does not exist|cannot (?:find|open)|unable to open)\b\D*?[\s:'\"]"
               r"(?P<path>[\w.~/+-]*/[\w./+-]+\.\w+)"),
    re.compile(r"(?P<path>[\w.~/+-]*[\w+-]\.\w+)['\"]? (?:was |is |does )?not (?:found|exist)"),
)  # fmt: skip
"""Messages of Python, shells, numpy and C++ programs about a missing file."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that the program lacks."""

    path: str
    """Below the folder that is pushed."""
    rule: str
    """Rule that leaves it out."""


def left_out_here(lines: Iterable[str], spec: Spec, *, folders: Iterable[str]) -> list[LeftOut]:
    """Return the files that these lines miss although they lie here, with the rule that leaves each of them out.

    Args:
        lines: the last ones that a worker printed.
        spec: of the run.
        folders: where the code was on the nodes, or the end of the path of such a folder; a path without one of them is
            relative to the code.
    """
    root = os.fsencode(os.path.realpath(spec.base_dir / spec.job.files.root))
    files = spec.job.files
    reasons: dict[str, str] = {}
    for line in lines:
        for pattern in _NOT_FOUND:
            for match in pattern.finditer(line):
                path = _below_code(match["path"], [*folders])
                if path and path not in reasons and os.path.lexists(root + b"/" + os.fsencode(path)):
                    rule = left_out.reason(root, os.fsencode(path), include=files.include, exclude=files.exclude)
                    if rule:
                        reasons[path] = rule
    return [LeftOut(path, rule) for path, rule in reasons.items()]


def _below_code(path: str, folders: list[str]) -> str:
    """Return a path as seen from the code; empty for one that lies elsewhere."""
    for folder in folders:
        _, found, below = path.partition(folder.rstrip("/") + "/")
        path = below if found else path
    path = os.path.normpath(path)
    return "" if path.startswith(("/", "..")) or path == "." else Path(path).as_posix()
