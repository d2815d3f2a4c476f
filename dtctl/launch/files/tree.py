"""The tree of files that is brought to the nodes, and the digest that proves that it arrived.

It is the working tree as it is, uncommitted edits included; `push_selection.py` has what is left out of it.
Private keys are left out whatever they are called, unless they are asked for by name.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dtctl.errors import PlanError
from dtctl.launch.files.digests import Digests
from dtctl.launch.files.push_selection import SelectedFile, TreeWalk

MAX_BYTES = 2 << 30
MAX_FILES = 100_000


class TreeFile(NamedTuple):
    """One file or symbolic link; a tuple, because there may be a hundred thousand."""

    path: bytes
    """Relative to the root, with `/`, as the file system spells it."""
    mode: int
    """0o600 or 0o700 for a file, stat.S_IFLNK for a link."""
    size: int
    """In bytes."""
    digest: str
    """SHA-256 of the contents, or of the link's target; 64 hexadecimal digits."""
    link: bytes = b""
    """Where a link leads: a relative path that stays in the tree."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What is pushed."""

    root: Path
    files: tuple[TreeFile, ...]
    """In the order of their paths, byte by byte."""
    digest: str
    """Of paths, modes and contents of all files; 32 hexadecimal digits."""
    withheld: tuple[str, ...]
    """Files and folders (with `/`) that were left out because they look like secrets."""
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
        include: patterns as in .gitignore of files to take although they are ignored. What looks like a secret is
            taken only if a pattern names it, as `.env` and `*.pem` do, `*` and the name of the folder do not.
        exclude: patterns as in .gitignore of files to leave out, whatever else is said.
        cache: folder for remembered digests; None to read every file.

    Raises:
        PlanError: no such folder, an unreadable file, a link that leaves the tree, or far too much.
    """
    if not root.is_dir():
        raise PlanError("the folder to push does not exist", where=str(root), hint="see `job.files.root`")
    top = os.fsencode(root.resolve())
    memory = cache / f"{hashlib.sha256(top).hexdigest()[:16]}.json" if cache else None
    walk = TreeWalk(top, include, exclude)
    try:
        selected = walk.run()
        _check_size(root, selected)
        with Digests(memory) as digests:
            entries = tuple(entry for file in selected if (entry := _entry(walk, file, digests)) is not None)
    except OSError as exc:
        raise PlanError(
            f"what is to be pushed cannot be read: {exc.strerror}",
            where=os.fsdecode(exc.filename or top),
            hint="name it in .dtctlignore if the job does not need it",
        ) from exc
    return Tree(root, entries, tree_digest(entries), tuple(sorted(walk.withheld)), tuple(sorted(walk.skipped)))


def tree_digest(entries: Iterable[TreeFile]) -> str:
    """One digest over paths, modes and contents; the node computes the same from what it is told and checks."""
    rows = [b"%d\0%o\0%s\0%s\0" % (len(e.path), e.mode, e.path, e.digest.encode()) for e in entries]
    return hashlib.sha256(b"".join(rows)).hexdigest()[:32]


def _entry(walk: TreeWalk, file: SelectedFile, digests: Digests) -> TreeFile | None:
    """The file with its digest; None if it is one that is not pushed."""
    full = walk.root + b"/" + file.path
    try:
        if stat.S_ISLNK(file.info.st_mode):
            link = _link(walk.root, file.path, full)
            if link:
                return TreeFile(file.path, stat.S_IFLNK, len(link), hashlib.sha256(link).hexdigest(), link)
            walk.skipped.append(os.fsdecode(file.path))
            return None
        digest, private = digests.of(file.path, full, file.info)
    except FileNotFoundError:
        return None  # an editor's passing file
    if private and not file.named:
        walk.withheld.append(os.fsdecode(file.path))
        return None
    mode = 0o700 if file.info.st_mode & stat.S_IXUSR else 0o600
    return TreeFile(file.path, mode, file.info.st_size, digest)


def _link(root: bytes, path: bytes, full: bytes) -> bytes:
    """Where a link leads, as a relative path that meets no other link on its way; empty if it leads nowhere.

    Raises:
        PlanError: it leads out of the tree.
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
    plain = os.path.join(os.path.realpath(parent), name)  # may be a link itself, which is kept
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
        f"{len(selected)} files, {total_bytes >> 20} MiB are too much to push (at most {MAX_FILES} files and "
        f"{MAX_BYTES >> 20} MiB)",
        where=str(root),
        hint="name what the job does not need in .dtctlignore; most of it is in "
        + ", ".join(f"{top} ({files[top]} files, {sizes[top] >> 20} MiB)" for top in largest),
    )
