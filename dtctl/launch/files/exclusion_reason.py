"""Rule that keeps a file of the working tree from being pushed, with its file and line.

This search is slower than the selection in `push_selection.py`, and is used for few files only.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence

from dtctl.launch.files.ignore import IgnoreRules, split_ignore_lines
from dtctl.launch.files.push_selection import (
    ALWAYS_LEFT_OUT,
    ENVIRONMENT_MARKS,
    GIT_IGNORE,
    OWN_IGNORE,
    SECRETS,
    read_rules,
)


def find_exclusion_reason(
    root: bytes, path: bytes, *, include: Sequence[str] = (), exclude: Sequence[str] = (), with_line: bool = True
) -> str:
    """Return the rule that excludes a file or folder, such as `.gitignore:3 (*.bin)`; empty if there is none.

    Args:
        root: folder that is pushed; an absolute path without links in it.
        path: path below the root; the path of a folder ends in `/`.
        include: patterns of `job.files.include`.
        exclude: patterns of `job.files.exclude`.
        with_line: whether to find the line of an ignore file, which takes longer than finding the file.
    """
    included = IgnoreRules(map(os.fsencode, include))
    parts = path.rstrip(b"/").split(b"/")
    for depth, name in enumerate(parts):
        folder = b"".join(part + b"/" for part in parts[:depth])
        is_last = depth == len(parts) - 1
        shown = name if is_last and not path.endswith(b"/") else name + b"/"
        if name in ALWAYS_LEFT_OUT:
            return f"{os.fsdecode(name)} is never pushed"
        if shown.endswith(b"/") and _is_environment(root + b"/" + folder + name):
            return f"{os.fsdecode(folder + name)} is a Python environment, and each node has its own environment"
        for pattern in exclude:
            if IgnoreRules([os.fsencode(pattern)]).verdict(folder, shown):
                return f"job.files.exclude ({pattern})"
        if included.verdict(folder, shown):
            if not is_last:
                return ""  # `include` names the folder, and so all its contents.
        elif rule := _ignored_by(root, folder, shown, with_line=with_line):
            return rule
        if SECRETS.match(shown):
            return f"{os.fsdecode(shown)} looks like a secret"
    return ""


def _is_environment(folder: bytes) -> bool:
    return any(os.path.lexists(folder + b"/" + mark) for mark in ENVIRONMENT_MARKS)


def _ignored_by(root: bytes, folder: bytes, name: bytes, *, with_line: bool) -> str:
    """Return the line of an ignore file that excludes a name; empty if no line does."""
    for kind in (OWN_IGNORE, GIT_IGNORE):
        for place, prefix in _list_ignore_files(root, folder, kind):
            text = read_rules(place)
            verdict = _rules_of(text).verdict(prefix, name)
            if verdict is None:
                continue
            shown = os.path.relpath(os.fsdecode(place), os.fsdecode(root))
            if not verdict or not with_line:
                return shown if verdict else ""
            lines = split_ignore_lines(text)
            deciding = (
                at for at in range(len(lines), 0, -1) if IgnoreRules([lines[at - 1]]).verdict(prefix, name) is not None
            )
            number = next(deciding)
            return f"{shown}:{number} ({os.fsdecode(lines[number - 1]).strip()})"
    return ""


@functools.lru_cache(maxsize=16)
def _rules_of(text: bytes) -> IgnoreRules:
    """Return the rules of an ignore file, cached because several names are often checked one after another."""
    return IgnoreRules(split_ignore_lines(text))


def _list_ignore_files(root: bytes, folder: bytes, kind: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the ignore files that may apply to a folder, the nearest first, each with the folder's path from there."""
    parts = folder.rstrip(b"/").split(b"/") if folder else []
    for depth in range(len(parts), -1, -1):
        above = b"".join(part + b"/" for part in parts[:depth])
        yield root + b"/" + above + kind, folder[len(above) :]
    place, prefix = root, folder
    while place and not os.path.lexists(place + b"/.git"):
        place, _, name = place.rpartition(b"/")
        prefix = name + b"/" + prefix
        if not place and not os.path.lexists(b"/.git"):
            return
        yield place + b"/" + kind, prefix
    if kind == GIT_IGNORE:
        yield place + b"/.git/info/exclude", prefix
