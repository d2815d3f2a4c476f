"""The tree of files that is brought to the nodes, and the digest that proves its arrival.

The tree is the working tree with uncommitted edits; `push_selection.py` decides which files are left out. Private keys
are left out under any name, unless `include` names them.

Digests of files are cached with their `stat` result, so that an unchanged tree is not read again. As in git, a cached
digest counts only if the file was last changed before the scan that read it began: a change within the same tick of the
file system's clock could not be detected ("racy git", git's Documentation/technical/racy-git.txt). The tick is that of
the file system's clock, which on a file server is not this machine's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dtctl import folders
from dtctl.errors import PlanError
from dtctl.launch.files.push_selection import SelectedFile, TreeWalk
from dtctl.printable import format_count
from dtctl.spec.model import Spec

MAX_BYTES = 2 << 30
MAX_FILES = 100_000
LARGE_BYTES = 100 << 20
"""Bytes from which the user is informed about the size of a tree, since so large a tree is seldom code only."""
TICK_NS = 20_000_000
"""Nanoseconds of a tick: no kernel in use updates the time of its file systems less often than 50 times a second."""
COARSE_TICK_NS = 2_000_000_000
"""Nanoseconds of a tick on file systems that store whole seconds, or steps of two seconds (FAT)."""
_PRIVATE_KEY = (b"-----BEGIN ", b"PRIVATE KEY", b"PuTTY-User-Key-File-")
_CHUNK_BYTES = 1 << 20
CACHE_BYTES = 256 << 20
"""Most bytes of cached digests, which suffice for some million files."""


class TreeFile(NamedTuple):
    """A file or symbolic link; a tuple, because there may be a hundred thousand."""

    path: bytes
    """Path relative to the root, with `/`, as the file system spells it."""
    mode: int
    """Mode: 0o600 or 0o700 for a file, stat.S_IFLNK for a link."""
    size: int
    """Bytes of the file."""
    digest: str
    """SHA-256 of the contents, or of the link's target, in 64 hexadecimal digits."""
    link: bytes = b""
    """Target of a link: a relative path that stays in the tree."""


@dataclass(frozen=True, slots=True)
class FileTree:
    """Files to push, with their digests."""

    root: Path
    files: tuple[TreeFile, ...]
    """Files in the order of their paths, byte by byte."""
    digest: str
    """Digest of paths, modes and contents of all files, in 32 hexadecimal digits."""
    withheld: tuple[str, ...]
    """Files and folders (with `/`) that were left out because they look like secrets."""
    skipped: tuple[str, ...]
    """Files that cannot be pushed: sockets, pipes, devices, links without a target."""
    left_out: tuple[str, ...] = ()
    """Files and folders (with `/`, without their contents) that a rule leaves out, in the order of their names."""

    @property
    def total_bytes(self) -> int:
        """Return the sum of the files' sizes."""
        return sum(entry.size for entry in self.files)

    @property
    def is_large(self) -> bool:
        """Return whether the user should be informed about the size before the push."""
        return self.total_bytes >= LARGE_BYTES


def scan_push_tree(
    root: Path, *, include: Sequence[str] = (), exclude: Sequence[str] = (), cache: Path | None = None
) -> FileTree:
    """Return the tree below `root`.

    Args:
        root: a folder.
        include: patterns as in .gitignore of files to take although they are ignored. A file that looks like a secret
            is taken only if a pattern names it, such as `.env` or `*.pem`, but not `*` or the name of the folder.
        exclude: patterns as in .gitignore of files to leave out, which take precedence over all others.
        cache: folder for cached digests; None to read every file.

    Raises:
        PlanError: the folder is missing, a file is unreadable, a link leaves the tree, or the tree is too large.
    """
    if not root.is_dir():
        raise PlanError("the folder to push does not exist", where=str(root), hint="see `job.files.root`")
    top = os.fsencode(root.resolve())
    memory = cache / f"{hashlib.sha256(top).hexdigest()[:16]}.json" if cache else None
    walk = TreeWalk(top, include, exclude)
    try:
        selected = walk.run()
        _check_size(root, selected)
        with DigestCache(memory) as digests:
            entries = tuple(entry for file in selected if (entry := _build_tree_file(walk, file, digests)) is not None)
    except OSError as exc:
        raise PlanError(
            f"the files to push cannot be read: {exc.strerror}",
            where=os.fsdecode(exc.filename or top),
            hint="name it in .dtctlignore if the job does not need it",
        ) from exc
    return FileTree(
        root,
        entries,
        compute_tree_digest(entries),
        withheld=tuple(sorted(walk.withheld)),
        skipped=tuple(sorted(walk.skipped)),
        left_out=tuple(sorted(walk.left_out)),
    )


def compute_tree_digest(entries: Iterable[TreeFile]) -> str:
    """Return one digest over paths, modes and contents; the node compares it with one from the manifest."""
    rows = [b"%d\0%o\0%s\0%s\0" % (len(e.path), e.mode, e.path, e.digest.encode()) for e in entries]
    return hashlib.sha256(b"".join(rows)).hexdigest()[:32]


def _build_tree_file(walk: TreeWalk, file: SelectedFile, digests: DigestCache) -> TreeFile | None:
    """Return the file with its digest; None if it is not pushed."""
    full = walk.root + b"/" + file.path
    try:
        if stat.S_ISLNK(file.info.st_mode):
            link = _resolve_link_target(walk.root, file.path, full)
            if link:
                return TreeFile(file.path, stat.S_IFLNK, len(link), hashlib.sha256(link).hexdigest(), link)
            walk.skipped.append(os.fsdecode(file.path))
            return None
        digest, private = digests.compute_file_digest(file.path, full, file.info)
    except FileNotFoundError:
        return None  # A temporary file of an editor is gone.
    if private and not file.named:
        walk.withheld.append(os.fsdecode(file.path))
        return None
    mode = 0o700 if file.info.st_mode & stat.S_IXUSR else 0o600
    return TreeFile(file.path, mode, file.info.st_size, digest)


def _resolve_link_target(root: bytes, path: bytes, full: bytes) -> bytes:
    """Return the target of a link as a relative path without other links; empty if the target does not exist.

    Raises:
        PlanError: the link leads out of the tree.
    """
    folder = os.path.dirname(full)
    target = os.path.realpath(full)
    if not os.path.exists(target):
        return b""
    if not _is_inside(root, target):
        raise PlanError(
            f"the link {os.fsdecode(path)} points outside the folder that is pushed, to {os.fsdecode(target)}",
            where=os.fsdecode(full),
            hint="name it in .dtctlignore, and give the path on the node to your script instead",
        )
    parent, name = os.path.split(os.path.join(folder, os.readlink(full)))
    plain = os.path.join(os.path.realpath(parent), name)  # The target may be a link itself, which is kept.
    if name in (b"", b".", b"..") or not _is_inside(root, plain):
        plain = target
    return os.path.relpath(plain, folder)


def _is_inside(root: bytes, path: bytes) -> bool:
    return path == root or path.startswith(os.path.join(root, b""))


def _check_size(root: Path, selected: Sequence[SelectedFile]) -> None:
    total_bytes = sum(file.info.st_size for file in selected)
    if total_bytes <= MAX_BYTES and len(selected) <= MAX_FILES:
        return
    files: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for file in selected:
        top = os.fsdecode(file.path.split(b"/", 1)[0])
        files[top] = files.get(top, 0) + 1
        sizes[top] = sizes.get(top, 0) + file.info.st_size
    largest = sorted(files, key=lambda top: -(sizes[top] if total_bytes > MAX_BYTES else files[top]))[:3]
    raise PlanError(
        f"{format_count(len(selected), 'file')}, {total_bytes >> 20} MiB are too many to push (at most {MAX_FILES} "
        f"files and {MAX_BYTES >> 20} MiB)",
        where=str(root),
        hint="name what the job does not need in .dtctlignore; most of it is in "
        + ", ".join(f"{top} ({format_count(files[top], 'file')}, {sizes[top] >> 20} MiB)" for top in largest),
    )


class DigestCache:
    """Cache of the digests of one tree's files: a context that writes new digests at its end, except after an error."""

    def __init__(self, path: Path | None) -> None:
        """Read the cached digests.

        Args:
            path: file of the cache; None to read every file and cache no digest. If the file is missing or damaged, all
                files are read.
        """
        self._path = path
        self._partial: Path | None = None
        self._began_ns = 0
        self._stored: dict[str, list[object]] = {}
        self._current: dict[str, list[object]] = {}
        self._changed = False

    def __enter__(self) -> DigestCache:  # noqa: PYI034 - Self is not in Python 3.10
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                stored = json.loads(folders.read_regular(str(self._path), CACHE_BYTES))
                self._stored = {str(key): list(row) for key, row in stored["files"].items()}
            with contextlib.suppress(OSError):  # A full or read-only disk must not prevent the launch.
                # Each folder is made separately, since `parents=True` ignores the mode for all folders above.
                self._path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                partial = self._path.with_suffix(f".{secrets.token_hex(4)}.partial")
                fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                self._partial = partial
                self._began_ns = os.fstat(fd).st_mtime_ns
                os.close(fd)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._path is None or self._partial is None:
            return
        with contextlib.suppress(OSError):
            if kind is None and (self._changed or len(self._current) != len(self._stored)):
                text = json.dumps({"files": self._current}, separators=(",", ":"))
                self._partial.write_text(text, encoding="ascii")
                self._partial.replace(self._path)
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def compute_file_digest(self, path: bytes, full: bytes, info: os.stat_result) -> tuple[str, bool]:
        """Return the digest of a file, 64 hexadecimal digits, and whether it is a private key.

        Args:
            path: name of the file in the tree.
            full: path of the file on the disk.
            info: current `lstat` result of the file.

        Raises:
            OSError: the file cannot be read.
        """
        key = path.decode("latin-1")
        seal = [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
        row = self._stored.get(key)
        if row is not None and row[:4] == seal and len(row) == 6:
            digest, private = str(row[4]), bool(row[5])
        else:
            digest, private = _read_file_digest(full)
            self._changed = True
        tick_ns = TICK_NS if info.st_ctime_ns % 1_000_000_000 else COARSE_TICK_NS
        if info.st_ctime_ns < self._began_ns - tick_ns:
            self._current[key] = [*seal, digest, private]
        return digest, private


def _read_file_digest(path: bytes) -> tuple[str, bool]:
    with open(path, "rb", buffering=0) as file:
        data = file.read(_CHUNK_BYTES)
        private = data.startswith(_PRIVATE_KEY[2]) or (
            data.startswith(_PRIVATE_KEY[0]) and _PRIVATE_KEY[1] in data[:100]
        )
        total = hashlib.sha256(data)
        while len(data) == _CHUNK_BYTES:
            data = file.read(_CHUNK_BYTES)
            total.update(data)
    return total.hexdigest(), private


def scan_pushed_files(spec: Spec) -> FileTree | None:
    """Return the files that would be pushed; None if no files are pushed.

    Raises:
        PlanError: the script is not among these files.
    """
    if not spec.pushes:
        return None
    files = spec.job.files
    tree = scan_push_tree(spec.base_dir / files.root, include=files.include, exclude=files.exclude)
    check_program_files(spec, tree)
    return tree


def list_pushed_paths(spec: Spec) -> list[Path]:
    """Return the paths of the files and links that a launch would push, without reading them.

    Raises:
        PlanError: the folder cannot be read.
    """
    files = spec.job.files
    top = os.fsencode((spec.base_dir / files.root).resolve())
    try:
        selected = TreeWalk(top, files.include, files.exclude).run()
    except OSError as exc:
        raise PlanError(
            f"the files to push cannot be read: {exc.strerror}", where=os.fsdecode(exc.filename or top)
        ) from exc
    return [Path(os.fsdecode(os.path.join(top, file.path))) for file in selected]


def check_program_files(spec: Spec, tree: FileTree) -> None:
    """Refuse a job whose script is not among the files that are pushed.

    Raises:
        PlanError: the script does not exist, or is left out of the push.
    """
    script = spec.job.script
    if script is None or Path(script).is_absolute():
        return
    script_path = os.path.normpath(script)
    if any(os.fsdecode(entry.path) == script_path for entry in tree.files):
        return
    path = Path(spec.base_dir) / spec.job.files.root / script
    if script_path.startswith(".."):
        raise PlanError(
            f"{script} lies outside of the folder that is pushed",
            where=str(path),
            hint="move it there, or name a folder above both as `job.files.root`",
        )
    if path.is_dir():
        raise PlanError(f"{script} is a folder", where=str(path), hint="name the script in it, or use `job.module`")
    if path.exists():
        from dtctl.launch.files import exclusion_reason

        files = spec.job.files
        root = os.fsencode(os.path.realpath(spec.base_dir / files.root))
        rule = exclusion_reason.find_exclusion_reason(
            root, os.fsencode(script_path), include=files.include, exclude=files.exclude
        )
        raise PlanError(
            f"{script} is not among the files that are pushed{f': {rule}' if rule else ''}",
            where=str(path),
            hint=f"`job.files.include: [{script_path}]` pushes it anyway",
        )
    near = _near_file(script_path, [os.fsdecode(entry.path) for entry in tree.files])
    hint = f"did you mean {near}?" if near else "`job.script` is relative to the folder of the spec"
    raise PlanError(f"there is no {script}", where=str(path), hint=hint)


def _near_file(path: str, files: Sequence[str]) -> str:
    """Return the file with the path most similar to a path, or with its name in another folder; empty: none."""
    import difflib

    folder, name = os.path.split(path)
    elsewhere = [file for file in files if os.path.basename(file) == name]
    beside = [os.path.basename(file) for file in files if os.path.dirname(file) == folder]
    same_kind = [file for file in beside if os.path.splitext(file)[1] == os.path.splitext(name)[1]]
    near = difflib.get_close_matches(name, same_kind, n=1) or difflib.get_close_matches(name, beside, n=1)
    candidates = [
        *(os.path.join(folder, file) for file in near),
        *elsewhere,
        *difflib.get_close_matches(path, files, n=1),
    ]
    return candidates[0] if candidates else ""
