"""Files that a program did not find on its node because a rule excluded them from the push."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dtctl.launch.files import exclusion_reason
from dtctl.spec.model import Spec

_NOT_FOUND = (
    re.compile(r"No such file or directory: b?(?P<quote>['\"])(?P<path>.+?)(?P=quote)"),
    re.compile(r"can't open file (?P<quote>['\"])(?P<path>.+?)(?P=quote)"),
    re.compile(r"(?:^|[\s:'\"])(?P<path>[^\s:'\"]+)['\"]?: No such file or directory"),
    re.compile(r"(?i)(?:no such file|not found|does not exist|(?:cannot|unable to) (?:find|open))\b\D*?[\s:'\"]"
               r"(?P<path>[\w.~/+-]*/[\w./+-]+\.\w+)"),
    re.compile(r"(?P<path>[\w.~/+-]*[\w+-]\.\w+)['\"]? (?:was |is |does )?not (?:found|exist)"),
)  # fmt: skip
"""Messages of Python, shells, numpy and C++ programs about a missing file."""
MAX_SIBLINGS: Final = 1000
"""Most entries of a folder that are checked."""


@dataclass(frozen=True, slots=True)
class MissingFile:
    """A file that the program lacks."""

    path: str
    """Path below the folder that is pushed; the path of a folder ends in `/`."""
    rule: str
    """Rule that excludes the file."""
    others: int = 0
    """Number of other files of the same folder that rules exclude, too; 0 if a folder is missing."""

    @property
    def include_pattern(self) -> str:
        """Return the pattern for `job.files.include`, which covers the folder if other files are missing, too."""
        folder = self.path.rpartition("/")[0]
        return f"{folder}/" if self.others and folder else self.path


def find_left_out_files(lines: Iterable[str], spec: Spec, *, folders: Iterable[str]) -> list[MissingFile]:
    """Return the files that these lines report as missing although they exist here, with the rules that exclude them.

    Args:
        lines: last lines that a worker printed.
        spec: spec of the run.
        folders: folders of the code on the nodes, or the ends of their paths; a path without one of these is relative
            to the code.
    """
    root = os.fsencode(os.path.realpath(spec.base_dir / spec.job.files.root))
    places = [*folders]
    found: dict[str, MissingFile | None] = {}
    for line in lines:
        for pattern in _NOT_FOUND:
            for match in pattern.finditer(line):
                path = _below_code(match["path"], places)
                if path and path not in found:
                    found[path] = _find_unsent_file(root, path, spec)
    return [file for file in found.values() if file is not None]


def _find_unsent_file(root: bytes, path: str, spec: Spec) -> MissingFile | None:
    """Return a file or folder that exists here and that a rule excludes; None for any other."""
    place = Path(os.fsdecode(root), path)
    if not os.path.lexists(place):
        return None
    is_folder = place.is_dir() and not place.is_symlink()
    path += "/" * is_folder
    rule = _find_rule(root, path, spec)
    if not rule:
        return None
    return MissingFile(path, rule, 0 if is_folder else _count_unsent_siblings(root, path, spec))


def _find_rule(root: bytes, path: str, spec: Spec, *, with_line: bool = True) -> str:
    files = spec.job.files
    return exclusion_reason.find_exclusion_reason(
        root, os.fsencode(path), include=files.include, exclude=files.exclude, with_line=with_line
    )


def _count_unsent_siblings(root: bytes, path: str, spec: Spec) -> int:
    """Return the number of other files in the folder of a file that rules exclude, too."""
    folder, slash, name = path.rpartition("/")
    with os.scandir(Path(os.fsdecode(root), folder)) as entries:
        files = [entry.name for entry in itertools.islice(entries, MAX_SIBLINGS) if entry.is_file()]
    others = [folder + slash + other for other in files if other != name]
    return sum(bool(_find_rule(root, other, spec, with_line=False)) for other in others)


def _below_code(path: str, folders: list[str]) -> str:
    """Return a path relative to the code; empty if it is outside of the code."""
    for folder in folders:
        _, found, below = path.partition(folder.rstrip("/") + "/")
        path = below if found else path
    path = os.path.normpath(path)
    return "" if path.startswith(("/", "..")) or path == "." else Path(path).as_posix()
