"""Which files are brought to the nodes, and the digest that proves that they arrived.

The working tree as it is, uncommitted edits included, without what .gitignore and .dtctlignore leave out, without
version control's own folders and virtual environments, and never a private key or an `.env` unless it is asked for by
name. An unchanged tree costs a walk: digests of files are remembered with what `stat` says about them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from dtctl.errors import PlanError

ALWAYS_LEFT_OUT = frozenset(
    {".git", ".hg", ".svn", ".dtctl", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)
IGNORE_FILES = (".gitignore", ".dtctlignore")
SECRETS = re.compile(
    r"(?:.*/)?(?:\.env(?:\.[^/]*)?|[^/]*\.(?:pem|key|p12|pfx)|id_(?:rsa|dsa|ecdsa|ed25519)|\.netrc|credentials[^/]*\.json"
    r"|\.(?:aws|ssh|kube)/)\Z"
)
"""Files and folders that look like secrets."""
MAX_BYTES = 2 << 30
MAX_FILES = 100_000
LINK_MODE = 0o120000


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file or symbolic link."""

    path: bytes
    """Relative to the root, with `/`, as the file system spells it."""
    mode: int
    """0o600 or 0o700 for a file, LINK_MODE for a link."""
    size: int
    digest: str
    """SHA-256 of the contents, or of the link's target; 64 hexadecimal digits."""
    link: bytes = b""
    """Where a link leads."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What is pushed."""

    root: Path
    files: tuple[FileEntry, ...]
    """In the order of their paths."""
    digest: str
    """Of paths, modes and contents of all files; 32 hexadecimal digits."""
    withheld: tuple[str, ...]
    """Files that were left out because they look like secrets."""
    skipped: tuple[str, ...]
    """What cannot be pushed: sockets, pipes, devices, links that lead nowhere."""

    @property
    def total_bytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(entry.size for entry in self.files)


def scan(root: Path, *, include: Sequence[str] = (), exclude: Sequence[str] = (), cache: Path | None = None) -> Tree:
    """The tree below `root`.

    Args:
        root: a folder.
        include: patterns as in .gitignore of files to take although they are ignored or look like secrets.
        exclude: patterns as in .gitignore of files to leave out.
        cache: folder for remembered digests; None to read every file.

    Raises:
        PlanError: no such folder, unreadable files, a link that leaves the tree, or far too much.
    """
    if not root.is_dir():
        raise PlanError("the folder to push does not exist", where=str(root), hint="see `job.files.root`")
    walk = _Walk(os.fsencode(root.resolve()), include, exclude)
    try:
        found = sorted(walk.files())
    except OSError as exc:
        raise PlanError(f"cannot read the folder to push: {exc.strerror}", where=str(exc.filename)) from exc
    _check_size(root, found)
    digests = _Digests(cache / f"{hashlib.sha256(walk.root).hexdigest()[:16]}.json" if cache else None)
    entries = tuple(_entry(walk.root, path, info, digests) for path, info in found)
    digests.save()
    return Tree(root, entries, tree_digest(entries), tuple(walk.withheld), tuple(walk.skipped))


def tree_digest(entries: Sequence[FileEntry]) -> str:
    """One digest over paths, modes and contents; the node computes the same from what it wrote."""
    total = hashlib.sha256()
    for entry in entries:
        total.update(b"%d\0%o\0%s\0%s\0" % (len(entry.path), entry.mode, entry.path, entry.digest.encode()))
    return total.hexdigest()[:32]


class _Walk:
    """Walks a folder as git would, without needing git."""

    def __init__(self, root: bytes, include: Sequence[str], exclude: Sequence[str]) -> None:
        self.root = root
        self.withheld: list[str] = []
        self.skipped: list[str] = []
        self._include = GitIgnoreSpec.from_lines(include)
        self._exclude = GitIgnoreSpec.from_lines(exclude)
        self._has_include = bool(include)
        self._has_exclude = bool(exclude)

    def files(self) -> Iterator[tuple[bytes, os.stat_result]]:
        """All files and links to push, with their `lstat`."""
        yield from self._folder(b"", ())

    def _folder(
        self, prefix: bytes, rules: tuple[tuple[bytes, GitIgnoreSpec], ...]
    ) -> Iterator[tuple[bytes, os.stat_result]]:
        with os.scandir(os.path.join(self.root, prefix)) as listing:
            entries = list(listing)
        names = {entry.name for entry in entries}
        if prefix and b"pyvenv.cfg" in names:
            return  # a virtual environment: the node has its own
        for ignore_file in IGNORE_FILES:
            if ignore_file.encode() in names:
                rules = (*rules, (prefix, _read_rules(os.path.join(self.root, prefix, ignore_file.encode()))))
        for entry in entries:
            path = prefix + entry.name
            text = os.fsdecode(path)
            if entry.is_dir(follow_symlinks=False):
                if entry.name.decode(errors="replace") in ALWAYS_LEFT_OUT:
                    continue
                if self._leave_out(path, text + "/", rules) and not self._may_hold_included(text):
                    continue
                yield from self._folder(path + b"/", rules)
            elif not self._leave_out(path, text, rules):
                yield from self._file(entry, path, text)

    def _leave_out(self, path: bytes, text: str, rules: tuple[tuple[bytes, GitIgnoreSpec], ...]) -> bool:
        if self._has_include and self._include.match_file(text):
            return False
        if self._has_exclude and self._exclude.match_file(text):
            return True
        for prefix, spec in reversed(rules):  # the deepest file decides
            verdict = spec.check_file(os.fsdecode(path[len(prefix) :]) + ("/" if text.endswith("/") else "")).include
            if verdict is not None:
                if verdict:
                    return True
                break
        if SECRETS.match(text):
            self.withheld.append(text)
            return True
        return False

    def _may_hold_included(self, folder: str) -> bool:
        """Whether a pattern of `include` names something below an ignored folder."""
        if not self._has_include:
            return False
        for pattern in self._include.patterns:
            text = str(getattr(pattern, "pattern", "") or "").lstrip("/")
            if text.startswith((folder + "/", "**/")) or "/" not in text.rstrip("/"):
                return True
        return False

    def _file(self, entry: os.DirEntry[bytes], path: bytes, text: str) -> Iterator[tuple[bytes, os.stat_result]]:
        info = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            target = os.path.realpath(os.path.join(self.root, path))
            if not os.path.exists(target):
                self.skipped.append(text)
                return
            if not (target + b"/").startswith(self.root + b"/"):
                raise PlanError(
                    f"the link {text} leads out of the folder that is pushed, to {os.fsdecode(target)}",
                    where=os.fsdecode(os.path.join(self.root, path)),
                    hint="name it in .dtctlignore, and give the path on the node to your script instead",
                )
        elif not stat.S_ISREG(info.st_mode):
            self.skipped.append(text)
            return
        yield path, info


def _read_rules(path: bytes) -> GitIgnoreSpec:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return GitIgnoreSpec.from_lines(file.read().splitlines())


def _check_size(root: Path, found: Sequence[tuple[bytes, os.stat_result]]) -> None:
    total = sum(info.st_size for _, info in found)
    if total <= MAX_BYTES and len(found) <= MAX_FILES:
        return
    by_folder: dict[str, int] = {}
    for path, info in found:
        top = os.fsdecode(path.split(b"/", 1)[0])
        by_folder[top] = by_folder.get(top, 0) + info.st_size
    largest = sorted(by_folder, key=lambda name: -by_folder[name])[:3]
    raise PlanError(
        f"{len(found)} files, {total >> 20} MiB are too much to push (at most {MAX_FILES} and {MAX_BYTES >> 20} MiB)",
        where=str(root),
        hint="name what the job does not need in .dtctlignore; the most is in "
        + ", ".join(f"{name} ({by_folder[name] >> 20} MiB)" for name in largest),
    )


def _entry(root: bytes, path: bytes, info: os.stat_result, digests: _Digests) -> FileEntry:
    full = os.path.join(root, path)
    if stat.S_ISLNK(info.st_mode):
        link = os.readlink(full)
        return FileEntry(path, LINK_MODE, len(link), hashlib.sha256(link).hexdigest(), link)
    mode = 0o700 if info.st_mode & stat.S_IXUSR else 0o600
    return FileEntry(path, mode, info.st_size, digests.of(path, full, info))


class _Digests:
    """Digests of files, remembered by what `stat` said when they were read.

    As in git, an entry counts only if the file was last changed well before the cache was written: a change within the
    same tick of the clock could not be told from none ("racy git", git's Documentation/technical/racy-git.txt).
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, list[object]] = {}
        self._fresh: dict[str, list[object]] = {}
        self._changed = False
        self._written_ns = 0
        if path is not None:
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))
                self._known, self._written_ns = dict(stored["files"]), int(stored["written_ns"])
            except (OSError, ValueError, KeyError, TypeError):
                self._known = {}  # none yet, or damaged: it is only a cache

    def of(self, path: bytes, full: bytes, info: os.stat_result) -> str:
        """Digest of the file at `full`."""
        key = path.decode("latin-1")
        seal = [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
        known = self._known.get(key)
        if (
            isinstance(known, list)
            and known[:4] == seal
            and len(known) == 5
            and info.st_ctime_ns < self._written_ns - 20_000_000
        ):
            digest = str(known[4])
        else:
            digest = _digest_file(full)
            self._changed = True
        self._fresh[key] = [*seal, digest]
        return digest

    def save(self) -> None:
        """Remember for the next time, if there is something new."""
        if self._path is None or not (self._changed or len(self._fresh) != len(self._known)):
            return
        text = json.dumps({"written_ns": time.time_ns(), "files": self._fresh}, separators=(",", ":"))
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(self._path)
        except OSError:
            partial.unlink(missing_ok=True)  # a full disk here must not keep a job from running elsewhere


def _digest_file(path: bytes) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read(1 << 20)
            total = hashlib.sha256(data)
            while len(data) == 1 << 20:
                data = file.read(1 << 20)
                total.update(data)
            return total.hexdigest()
    except OSError as exc:
        raise PlanError(f"cannot read a file that is to be pushed: {exc.strerror}", where=os.fsdecode(path)) from exc
