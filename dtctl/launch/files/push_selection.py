"""Selection of the files to push: .gitignore, .dtctlignore, the spec and built-in rules.

The selection needs no git, and follows git's rules for .gitignore files in and above the tree in the same checkout and
for .git/info/exclude. Files that git tracks although they match a rule are left out: only git's index lists them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from dtctl.launch.files.ignore import IgnoreRules, split_ignore_lines

ALWAYS_LEFT_OUT = frozenset(
    {b".git", b".hg", b".svn", b".dtctl", b"__pycache__", b".mypy_cache", b".pytest_cache", b".ruff_cache"}
)
ENVIRONMENT_MARKS = frozenset({b"pyvenv.cfg", b"conda-meta"})
"""Files in the top folder of a Python environment; a node has its own environment."""
SECRETS = re.compile(
    rb"(?:\.env(?:\..*|rc)?|.*\.(?:pem|key|p12|pfx|ppk|jks|kdbx)|id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?|[._]netrc|\.pypirc"
    rb"|\.pgpass|\.git-credentials|\.htpasswd|kaggle\.json|credentials.*\.json|\.(?:aws|ssh|kube|gnupg)/)\Z",
    re.IGNORECASE | re.DOTALL,
)
"""Names of files, and of folders with a `/`, that look like secrets."""
GIT_IGNORE, OWN_IGNORE = b".gitignore", b".dtctlignore"


class SelectedFile(NamedTuple):
    """A file or link to push; a tuple, because there may be a hundred thousand."""

    path: bytes
    """Path relative to the root."""
    info: os.stat_result
    """Result of `lstat` for the file."""
    named: bool
    """True if `include` names this file itself."""


@dataclass(frozen=True, slots=True)
class _FolderRules:
    """Rules that apply in a folder."""

    dtctlignore: tuple[tuple[bytes, IgnoreRules], ...] = ()
    """.dtctlignore files here and above, the deepest first, each with the path of the folder relative to it."""
    gitignore: tuple[tuple[bytes, IgnoreRules], ...] = ()
    """.gitignore files in the same form; rules in `dtctlignore` take precedence."""
    ignored: bool = False
    """True if the folder is left out, and walked only for files that `include` names."""
    included: bool = False
    """True if `include` names the folder, and so all its contents."""
    trusted: bool = False
    """True if `include` names a folder that looks like a secret, so that its contents are wanted."""

    def enter_folder(self, name: bytes, *, ignored: bool, included: bool, trusted: bool) -> _FolderRules:
        """Return the rules for the folder `name` (with `/`) in this folder."""
        own = tuple((prefix + name, rules) for prefix, rules in self.dtctlignore)
        git = tuple((prefix + name, rules) for prefix, rules in self.gitignore)
        return _FolderRules(own, git, ignored, included, trusted)

    def ignores(self, name: bytes) -> bool:
        """Return whether the ignore files exclude `name`."""
        for chain in (self.dtctlignore, self.gitignore):
            for prefix, rules in chain:
                verdict = rules.verdict(prefix, name)
                if verdict is not None:
                    return verdict
        return False


class TreeWalk:
    """Walk through a folder by git's rules."""

    def __init__(self, root: bytes, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        """Prepare to walk.

        Args:
            root: an absolute path without links in it.
            include: patterns of files to take although they are ignored; a secret is taken only if a pattern names it.
            exclude: patterns of files to leave out, which take precedence over all others.
        """
        self.root = root
        self._own_output = own_output()
        self.withheld: list[str] = []
        """Files that were left out because they look like secrets."""
        self.skipped: list[str] = []
        """Files that cannot be pushed: sockets, pipes, devices."""
        self.left_out: list[str] = []
        """Files that a rule leaves out; a folder (with `/`) that is left out stands for its contents."""
        patterns = [os.fsencode(pattern) for pattern in include]
        self._include = IgnoreRules(patterns)
        self._named = IgnoreRules(pattern for pattern in patterns if _names_a_file(pattern))
        self._include_folders = [_folders_of(pattern) for pattern in patterns]
        self._exclude = IgnoreRules(os.fsencode(pattern) for pattern in exclude)

    def run(self) -> list[SelectedFile]:
        """Return all files and links to push, in the order of their paths.

        Raises:
            OSError: a folder cannot be read.
        """
        selected: list[SelectedFile] = []
        todo = [(b"", _read_parent_rules(self.root))]
        while todo:
            prefix, level = todo.pop()
            with os.scandir(self.root + b"/" + prefix) as listing:
                entries = list(listing)
            if prefix and not ENVIRONMENT_MARKS.isdisjoint([entry.name for entry in entries]):
                self.left_out.append(os.fsdecode(prefix))
                continue
            if not level.ignored:
                level = _with_rules(level, entries)
            todo.extend(self._select_folder_files(prefix, level, entries, selected))
        selected.sort()
        return selected

    def _select_folder_files(
        self, prefix: bytes, level: _FolderRules, entries: list[os.DirEntry[bytes]], selected: list[SelectedFile]
    ) -> Iterator[tuple[bytes, _FolderRules]]:
        """Add the files of one folder to `selected`; yield the inner folders to walk into."""
        plain = not (self._include or self._exclude)
        for entry in entries:
            name = entry.name
            if name in ALWAYS_LEFT_OUT:
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder:
                name += b"/"
            if plain:
                take, included, named = not level.ignores(name), False, False
            else:
                take, included, named = self._match_selection_rules(prefix, level, name)
            secret = take and SECRETS.match(name) is not None
            if secret and not (named or level.trusted):
                self.withheld.append(os.fsdecode(prefix + name))
            elif is_folder and (take or self._may_hold_included(prefix + name)):
                trusted = level.trusted or (named and secret)
                yield prefix + name, level.enter_folder(name, ignored=not take, included=included, trusted=trusted)
            elif not take:
                self.left_out.append(os.fsdecode(prefix + name))
            else:
                info = _stat_folder_entry(entry)
                if info is None or (info.st_dev, info.st_ino) in self._own_output:
                    # A temporary file of an editor is gone, and `dtctl launch > launch.log` grows while it is read.
                    continue
                if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
                    selected.append(SelectedFile(prefix + name, info, named or level.trusted))
                else:
                    self.skipped.append(os.fsdecode(prefix + name))

    def _match_selection_rules(self, prefix: bytes, level: _FolderRules, name: bytes) -> tuple[bool, bool, bool]:
        """Return whether a name is taken, whether because of `include`, and whether a pattern names it explicitly."""
        if self._exclude.verdict(prefix, name):
            return False, False, False
        if self._include.verdict(prefix, name):
            return True, True, bool(self._named.verdict(prefix, name))
        if level.included:
            return True, True, False
        return not (level.ignored or level.ignores(name)), False, False

    def _may_hold_included(self, folder: bytes) -> bool:
        """Return whether a pattern of `include` may name a file below an ignored folder."""
        parts = folder.split(b"/")[:-1]
        for folder_patterns in self._include_folders:
            for name, pattern in zip(parts, folder_patterns, strict=False):
                if pattern == b"**":
                    return True
                if not fnmatchcase(name, pattern):
                    break
            else:
                if len(folder_patterns) >= len(parts):
                    return True
        return False


def _stat_folder_entry(entry: os.DirEntry[bytes]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _names_a_file(pattern: bytes) -> bool:
    """Return whether a pattern may name a secret: its last part has no wildcard, or looks like a secret (`*.pem`)."""
    last = pattern.rstrip(b"/").rpartition(b"/")[2]
    return not any(sign in b"*?[" for sign in last) or bool(SECRETS.match(last))


def _folders_of(pattern: bytes) -> list[bytes]:
    """Return the folders, from the top, in which a pattern can match; `**` for any folder."""
    parts = pattern.rstrip(b"/").split(b"/")
    if len(parts) == 1:
        return [b"**"]
    return [name for name in parts[:-1] if name]


def _read_parent_rules(root: bytes) -> _FolderRules:
    """Return the rules of the checkout around `root`: a .gitignore applies to all folders below its own."""
    own: list[tuple[bytes, IgnoreRules]] = []
    git: list[tuple[bytes, IgnoreRules]] = []
    folder, prefix = root, b""
    while not os.path.lexists(folder + b"/.git"):
        if not folder:
            return _FolderRules()  # The root is not in a checkout.
        folder, _, name = folder.rpartition(b"/")
        prefix = name + b"/" + prefix
        own += _read_ignore_rules(folder + b"/" + OWN_IGNORE, prefix)
        git += _read_ignore_rules(folder + b"/" + GIT_IGNORE, prefix)
    return _FolderRules(tuple(own), (*git, *_read_ignore_rules(folder + b"/.git/info/exclude", prefix)))


def _with_rules(level: _FolderRules, entries: list[os.DirEntry[bytes]]) -> _FolderRules:
    """Return the rules of a folder with those of the ignore files in the folder itself."""
    own, git = level.dtctlignore, level.gitignore
    for entry in entries:
        if entry.name == OWN_IGNORE:
            own = (*_read_ignore_rules(entry.path), *own)
        elif entry.name == GIT_IGNORE:
            git = (*_read_ignore_rules(entry.path), *git)
    return replace(level, dtctlignore=own, gitignore=git)


def _read_ignore_rules(path: bytes, prefix: bytes = b"") -> list[tuple[bytes, IgnoreRules]]:
    """Return the rules in a file; empty if it has none."""
    rules = IgnoreRules(split_ignore_lines(read_rules(path)))
    return [(prefix, rules)] if rules else []


def read_rules(path: bytes) -> bytes:
    """Return the text of an ignore file; as in git, a link or an unreadable file counts as empty."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read()
    except OSError:
        return b""


def own_output() -> frozenset[tuple[int, int]]:
    """Return device and inode of the files that this process prints to."""
    identities = set()
    for fd in (1, 2):
        try:
            info = os.fstat(fd)
        except OSError:
            continue  # The stream is closed.
        if stat.S_ISREG(info.st_mode):
            identities.add((info.st_dev, info.st_ino))
    return frozenset(identities)
