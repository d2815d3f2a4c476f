"""Numbers and sizes of the files in the working tree that rules exclude from the push, folder by folder."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dtctl.launch.files import exclusion_reason
from dtctl.launch.files.ignore import IgnoreRules
from dtctl.launch.files.push_selection import ALWAYS_LEFT_OUT, ENVIRONMENT_MARKS
from dtctl.launch.files.tree import FileTree
from dtctl.spec.model import Spec

MAX_FILES: Final = 2000
MAX_CPU_S: Final = 0.01
MAX_S: Final = 0.5
"""Limits of the count in files, seconds of processor time and seconds, since a launch must not wait for it. On a slow
disk or a busy machine, more time passes than the processor spends.
"""
CACHE_MARK: Final = b"CACHEDIR.TAG"
"""File in the top folder of a cache (https://bford.info/cachedir)."""


@dataclass(slots=True)
class UnsentFiles:
    """Files of one folder that are not sent."""

    folder: str
    """Path below the folder that is pushed; empty for that folder itself."""
    path: str
    """Path that `rule` excludes: a file or a folder (with `/`) in `folder`, or `folder` itself."""
    is_whole: bool = False
    """True if no file of the folder is sent."""
    files: int = 0
    bytes: int = 0
    is_partial: bool = False
    """True if not all files were counted."""
    rule: str = ""
    """Rule that excludes `path`, as `exclusion_reason.find_exclusion_reason` returns it."""

    @property
    def is_chosen(self) -> bool:
        """Return whether the rule was written for dtctl, so that the user expects its effect."""
        return self.rule.startswith("job.files.exclude") or self.rule.endswith(".dtctlignore")


def list_not_sent(spec: Spec, tree: FileTree, *, most: int) -> list[UnsentFiles]:
    """Return the folders with files that rules exclude from the push, the largest first.

    Hidden files, caches, environments, the job's outputs and data, and folders of its wheels do not count, since no
    program needs them from a push.

    Args:
        spec: the checked spec.
        tree: the scanned files of the spec.
        most: number of folders to return.
    """
    root, files = os.fsencode(os.path.realpath(tree.root)), spec.job.files
    counter, needless = _FileCounter(root), _NeedlessPaths(spec, tree)
    groups: dict[str, UnsentFiles] = {}
    for path in tree.left_out:
        if needless.covers_path(path):
            continue
        is_folder = path.endswith("/")
        key = path.rstrip("/") if is_folder else path.rpartition("/")[0]
        group = groups.setdefault(key, UnsentFiles(key, path, is_folder))
        if not counter.add(group, os.fsencode(path)):
            break
    found = sorted((group for group in groups.values() if group.files), key=lambda group: (-group.bytes, group.folder))
    for group in found[:most]:
        kept = os.fsencode(group.path)
        group.rule = exclusion_reason.find_exclusion_reason(
            root, kept, include=files.include, exclude=files.exclude, with_line=False
        )
    return found[:most]


class _NeedlessPaths:
    """Paths that no program needs from a push: hidden ones, outputs, data and wheels."""

    def __init__(self, spec: Spec, tree: FileTree) -> None:
        self._outputs = [path for path in spec.job.outputs if not path.startswith("/")]
        self._outputs += [entry.path for entry in spec.job.shared_folders]
        self._output_rules = IgnoreRules(os.fsencode(pattern) for pattern in self._outputs)
        sources = (spec.base_dir / Path(entry.source).expanduser() for entry in spec.job.data)
        self._data = [os.path.relpath(source, tree.root) for source in sources]
        self._wheels = [os.path.relpath(wheel, tree.root) for wheel in _wheels_of(spec)]

    def covers_path(self, path: str) -> bool:
        """Return whether a path is one of these, or a folder (with `/`) that contains outputs or wheels."""
        if path.startswith(".") or "/." in path:
            return True
        if any(f"{path}/".startswith(f"{source}/") for source in self._data):
            return True
        if path in self._wheels or any(output.startswith(path) for output in self._outputs):
            return True
        if path.endswith("/") and any(wheel.startswith(path) for wheel in self._wheels):
            return True
        return _is_covered(self._output_rules, os.fsencode(path))


def _is_covered(rules: IgnoreRules, path: bytes) -> bool:
    """Return whether rules name a path, or a folder that contains it."""
    ends = [at + 1 for at in range(len(path)) if path[at : at + 1] == b"/"]
    if not path.endswith(b"/"):
        ends.append(len(path))
    for end in ends:
        folder, _, name = path[: end - 1].rpartition(b"/")
        last = name + path[end - 1 : end]
        if rules.verdict(folder + b"/" * bool(folder), last):
            return True
    return False


def _wheels_of(spec: Spec) -> Iterator[Path]:
    """Yield the wheels of this machine that the job's requirements name; they are pushed with the environment."""
    environment = spec.job.environment
    if environment is None or environment.requirements is None:
        return
    path = spec.base_dir / environment.requirements.expanduser()
    with contextlib.suppress(OSError):  # The code that makes the environment reports such errors.
        for word in path.read_text(encoding="utf-8", errors="replace").split():
            if word.endswith(".whl"):
                yield path.parent / word.removeprefix("file://")


class _FileCounter:
    """Count of files with the limits of a launch."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._left = MAX_FILES
        self._caches: dict[bytes, bool] = {}
        self._deadline, self._cpu_deadline = time.monotonic() + MAX_S, time.thread_time() + MAX_CPU_S

    def add(self, group: UnsentFiles, path: bytes) -> bool:
        """Add a file, or the files of a folder, to the sums of a group; return whether the limit allows more."""
        for info in self._walk_unsent_files(path):
            if not self._left or time.monotonic() > self._deadline or time.thread_time() > self._cpu_deadline:
                group.is_partial = True
                return False
            self._left -= 1
            group.files += 1
            group.bytes += info.st_size
        return True

    def _is_in_cache(self, folder: bytes) -> bool:
        """Return whether a folder is a cache; called once for each folder."""
        if folder not in self._caches:
            self._caches[folder] = os.path.lexists(folder + b"/" + CACHE_MARK)
        return self._caches[folder]

    def _walk_unsent_files(self, path: bytes) -> Iterator[os.stat_result]:
        """Yield the `lstat` result of a file, or of all files in a folder that is not a cache or an environment."""
        todo = [self._root + b"/" + path]
        while todo:
            place = todo.pop()
            try:
                if not place.endswith(b"/"):
                    if not self._is_in_cache(place.rpartition(b"/")[0]):
                        yield os.lstat(place)
                    continue
                with os.scandir(place) as listing:
                    entries = list(listing)
                marks = {entry.name for entry in entries}
                if CACHE_MARK in marks or not ENVIRONMENT_MARKS.isdisjoint(marks):
                    continue
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name not in ALWAYS_LEFT_OUT and not entry.name.startswith(b"."):
                            todo.append(entry.path + b"/")
                    elif stat.S_ISREG((info := entry.stat(follow_symlinks=False)).st_mode):
                        yield info
            except OSError:
                continue  # The folder was removed, or this user may not read it.
