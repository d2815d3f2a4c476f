"""Selection of the files to push: .gitignore, .dtctlignore, the spec and built-in rules.

Works without git, and follows git's rules for .gitignore files of the tree and above it in the same checkout, and for
.git/info/exclude. Files that git tracks although it ignores them are left out: only git's index has them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from dtctl.launch.files.ignore import Rules, split

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
"""Names of files, and with a `/` of folders, that look like secrets."""
GIT_IGNORE, OWN_IGNORE = b".gitignore", b".dtctlignore"


class SelectedFile(NamedTuple):
    """A file or link to push; a tuple, because there may be a hundred thousand."""

    path: bytes
    """Relative to the root."""
    info: os.stat_result
    """Result of `lstat`."""
    named: bool
    """`include` asks for this very file."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Rules that hold when a folder is entered."""

    dtctlignore: tuple[tuple[bytes, Rules], ...] = ()
    """.dtctlignore files here and above, the deepest first, each with the path of the folder as seen from it."""
    gitignore: tuple[tuple[bytes, Rules], ...] = ()
    """.gitignore files, likewise. They are asked after `own`, so that .dtctlignore has the last word."""
    ignored: bool = False
    """The folder is left out, and walked only for what `include` names."""
    included: bool = False
    """`include` names the folder, and so takes all that is in it."""
    trusted: bool = False
    """`include` names a folder that looks like a secret: what is in it was asked for."""

    def below(self, name: bytes, *, ignored: bool, included: bool, trusted: bool) -> _Level:
        """Return the level of the folder `name` (with `/`) in this one."""
        own = tuple((prefix + name, rules) for prefix, rules in self.dtctlignore)
        git = tuple((prefix + name, rules) for prefix, rules in self.gitignore)
        return _Level(own, git, ignored, included, trusted)

    def ignores(self, name: bytes) -> bool:
        """Return whether the ignore files exclude `name`."""
        for chain in (self.dtctlignore, self.gitignore):
            for prefix, rules in chain:
                verdict = rules.verdict(prefix, name)
                if verdict is not None:
                    return verdict
        return False


class TreeWalk:
    """Walks a folder as git would."""

    def __init__(self, root: bytes, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        """Prepare to walk.

        Args:
            root: an absolute path without links in it.
            include: patterns of files to take although they are ignored; a secret only if one names it.
            exclude: patterns of files to leave out, which take precedence over all others.
        """
        self.root = root
        self._own_output = own_output()
        self.withheld: list[str] = []
        """Files that were left out because they look like secrets."""
        self.skipped: list[str] = []
        """Files that cannot be pushed: sockets, pipes, devices."""
        self.left_out: list[str] = []
        """Files that a rule leaves out; of a folder (with `/`) from which nothing is taken, not its contents."""
        patterns = [os.fsencode(pattern) for pattern in include]
        self._include = Rules(patterns)
        self._named = Rules(pattern for pattern in patterns if _names_a_file(pattern))
        self._include_folders = [_folders_of(pattern) for pattern in patterns]
        self._exclude = Rules(os.fsencode(pattern) for pattern in exclude)

    def run(self) -> list[SelectedFile]:
        """Return all files and links to push, in the order of their paths.

        Raises:
            OSError: a folder cannot be read.
        """
        selected: list[SelectedFile] = []
        todo = [(b"", _above(self.root))]
        while todo:
            prefix, level = todo.pop()
            with os.scandir(self.root + b"/" + prefix) as listing:
                entries = list(listing)
            if prefix and not ENVIRONMENT_MARKS.isdisjoint([entry.name for entry in entries]):
                self.left_out.append(os.fsdecode(prefix))
                continue
            if not level.ignored:
                level = _with_rules(level, entries)
            todo.extend(self._folder(prefix, level, entries, selected))
        selected.sort()
        return selected

    def _folder(
        self, prefix: bytes, level: _Level, entries: list[os.DirEntry[bytes]], selected: list[SelectedFile]
    ) -> Iterator[tuple[bytes, _Level]]:
        """Add the files of one folder to `found`; the folders in it to walk into."""
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
                take, included, named = self._decide(prefix, level, name)
            secret = take and SECRETS.match(name) is not None
            if secret and not (named or level.trusted):
                self.withheld.append(os.fsdecode(prefix + name))
            elif is_folder and (take or self._may_hold_included(prefix + name)):
                trusted = level.trusted or (named and secret)
                yield prefix + name, level.below(name, ignored=not take, included=included, trusted=trusted)
            elif not take:
                self.left_out.append(os.fsdecode(prefix + name))
            else:
                info = _lstat(entry)
                if info is None or (info.st_dev, info.st_ino) in self._own_output:
                    continue  # an editor's passing file; or `dtctl launch > launch.log`, which grows while it is read
                if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
                    selected.append(SelectedFile(prefix + name, info, named or level.trusted))
                else:
                    self.skipped.append(os.fsdecode(prefix + name))

    def _decide(self, prefix: bytes, level: _Level, name: bytes) -> tuple[bool, bool, bool]:
        """Return whether to take a name, whether because of `include`, and whether a pattern names it explicitly."""
        if self._exclude.verdict(prefix, name):
            return False, False, False
        if self._include.verdict(prefix, name):
            return True, True, bool(self._named.verdict(prefix, name))
        if level.included:
            return True, True, False
        return not (level.ignored or level.ignores(name)), False, False

    def _may_hold_included(self, folder: bytes) -> bool:
        """Return whether a pattern of `include` may name something below an ignored folder."""
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


def _lstat(entry: os.DirEntry[bytes]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _names_a_file(pattern: bytes) -> bool:
    """Return whether a pattern can ask for a secret: its last part is plain, or itself looks like one (`*.pem`)."""
    last = pattern.rstrip(b"/").rpartition(b"/")[2]
    return not any(sign in b"*?[" for sign in last) or bool(SECRETS.match(last))


def _folders_of(pattern: bytes) -> list[bytes]:
    """Return the folders, from the top, in which a pattern finds something; `**` for any."""
    parts = pattern.rstrip(b"/").split(b"/")
    if len(parts) == 1:
        return [b"**"]
    return [name for name in parts[:-1] if name]


def _above(root: bytes) -> _Level:
    """The rules that the checkout around `root` has for it: a .gitignore counts for all folders below its own."""
    own: list[tuple[bytes, Rules]] = []
    git: list[tuple[bytes, Rules]] = []
    folder, prefix = root, b""
    while not os.path.lexists(folder + b"/.git"):
        if not folder:
            return _Level()  # no checkout
        folder, _, name = folder.rpartition(b"/")
        prefix = name + b"/" + prefix
        own += _read(folder + b"/" + OWN_IGNORE, prefix)
        git += _read(folder + b"/" + GIT_IGNORE, prefix)
    return _Level(tuple(own), (*git, *_read(folder + b"/.git/info/exclude", prefix)))


def _with_rules(level: _Level, entries: list[os.DirEntry[bytes]]) -> _Level:
    """Return the level with the ignore files that lie in the folder itself."""
    own, git = level.dtctlignore, level.gitignore
    for entry in entries:
        if entry.name == OWN_IGNORE:
            own = (*_read(entry.path), *own)
        elif entry.name == GIT_IGNORE:
            git = (*_read(entry.path), *git)
    return replace(level, dtctlignore=own, gitignore=git)


def _read(path: bytes, prefix: bytes = b"") -> list[tuple[bytes, Rules]]:
    """Return the rules in a file, if it has any."""
    rules = Rules(split(read_rules(path)))
    return [(prefix, rules)] if rules else []


def read_rules(path: bytes) -> bytes:
    """Text of an ignore file. As for git, a link is no such file, nor is one that cannot be read: empty."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read()
    except OSError:
        return b""


def own_output() -> frozenset[tuple[int, int]]:
    """Device and inode of the files that this process prints to."""
    identities = set()
    for fd in (1, 2):
        try:
            info = os.fstat(fd)
        except OSError:
            continue  # closed
        if stat.S_ISREG(info.st_mode):
            identities.add((info.st_dev, info.st_ino))
    return frozenset(identities)
