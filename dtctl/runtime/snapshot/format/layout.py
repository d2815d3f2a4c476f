"""Layout of a snapshot on disk: names, manifest, commit record, digests of files."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import importlib
import importlib.util
import json
import mmap
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from dtctl import folders
from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot.format.headers import Malformed
from dtctl.runtime.snapshot.storage.place import Place, Remote

FORMAT: Final = 2
"""Format of snapshots whose parts are whole files."""
FORMAT_SPREAD: Final = 3
"""Format of snapshots whose parts are in several files, a worker's pieces in each."""
MANIFEST: Final = "manifest.json"
COMMIT: Final = "COMMIT"
RECORD_BYTES: Final = 64 << 20
"""A longer manifest, or commit record, is none."""
HASH_IN_MEMORY: Final = "xxh3_128"
HASHES: Final = ("blake3", "sha256", HASH_IN_MEMORY)
PART_SUFFIX: Final = ".safetensors"
DRAFT_SUFFIX: Final = ".draft"
"""Suffix of folders that a writer has not renamed into place (yet, or ever); they begin with a dot."""
CHUNK_BYTES: Final = 1 << 18
"""Bytes that are hashed and written, or read and hashed, at a time: it stays in the cache between the two."""

_PIECES = re.compile(r"(.+)\.(\d{5,})" + re.escape(PART_SUFFIX) + r"\Z")
_FOLDER = re.compile(r"step-(\d{8,})(?:\.\d{8}T\d{6}-[0-9a-f]{8})?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """One file of a snapshot."""

    size_bytes: int
    digest: str
    """Hexadecimal, by the manifest's hash."""
    part: str | None = None
    """Part that the file has pieces of. None: it has a whole part, and its name."""

    def document(self) -> dict[str, Any]:
        """Return the record as JSON."""
        entry: dict[str, Any] = {"size_bytes": self.size_bytes, "digest": self.digest}
        return entry if self.part is None else {**entry, "part": self.part}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest of a snapshot."""

    step: int
    """Optimizer steps done."""
    hash: str
    """blake3 or sha256; xxh3_128 of a snapshot in memory."""
    facts: Mapping[str, Any]
    """The loop's own state and the circumstances it ran in; JSON."""
    files: Mapping[str, SnapshotFile]
    text: bytes = b""
    """Text that it was read from; the commit record has its digest."""

    def to_bytes(self) -> bytes:
        """Return the text of manifest.json."""
        files = {name: entry.document() for name, entry in self.files.items()}
        spread = any(entry.part is not None for entry in self.files.values())
        form = FORMAT_SPREAD if spread else FORMAT
        document = {"format": form, "step": self.step, "hash": self.hash, "facts": dict(self.facts), "files": files}
        return (json.dumps(document, indent=1) + "\n").encode()

    def part_of(self, name: str) -> str:
        """Return the part that a file belongs to."""
        return self.files[name].part or name.removesuffix(PART_SUFFIX)

    @classmethod
    def from_bytes(cls, text: bytes, *, where: str) -> Manifest:
        """Return the manifest from a text with a verified digest.

        Raises:
            Malformed: the text is no manifest.
            SnapshotError: the format is of a later version.
        """
        try:
            document = json.loads(text)
            form = document["format"]
        except (ValueError, LookupError, TypeError, RecursionError) as exc:
            raise Malformed(f"{MANIFEST} is malformed: {exc}") from None
        if type(form) is not int:
            raise Malformed(f"{MANIFEST} is malformed: its format is {ascii(form)[:80]}")
        if form not in (FORMAT, FORMAT_SPREAD):
            raise SnapshotError(
                f"the snapshot has format {form}, and this version reads {FORMAT} and {FORMAT_SPREAD}",
                where=where,
                hint="resume with the version of dtctl that wrote it, or later",
            )
        try:
            files = {name: _entry(name, entry) for name, entry in document["files"].items()}
            manifest = cls(
                step=document["step"], hash=document["hash"], facts=document["facts"], files=files, text=bytes(text)
            )
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise Malformed(f"{MANIFEST} is malformed: {exc}") from None
        if type(manifest.step) is not int or manifest.hash not in HASHES or not isinstance(manifest.facts, dict):
            raise Malformed(f"{MANIFEST} is malformed: step, hash or facts are of another kind")
        return manifest


def _entry(name: str, entry: Mapping[str, Any]) -> SnapshotFile:
    file = SnapshotFile(**entry)
    # A name is no path: what is read lies in the snapshot's own folder.
    right = folders.is_name(name) and name not in (MANIFEST, COMMIT)
    right = right and type(file.size_bytes) is int and file.size_bytes >= 0
    if not (right and isinstance(file.digest, str) and (file.part is None or folders.is_name(file.part))):
        raise ValueError(f"its file {ascii(name)[:80]}")
    return file


def folder_of(folder: Place, step: int) -> Place:
    """Return where the snapshot of a step lies, on disk."""
    return folder / f"step-{step:08d}"


def attempt_name(step: int) -> str:
    """Return a snapshot's folder name where nothing can be renamed: `step-00000100.20261121T195221-5f0c93d1`.

    No two attempts have the same, so that what one that died has left, or still sends, is never part of another, and
    what is committed never changes. Those of one step are in the order of time.
    """
    now = dt.datetime.now(dt.timezone.utc)
    return f"step-{step:08d}.{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def piece_name(part: str, rank: int) -> str:
    """Return what one worker's pieces of a part are called; the file has a suffix on top."""
    return f"{part}.{rank:05d}"


def rank_of(name: str) -> int | None:
    """Return the worker whose pieces a file has; None for a whole part."""
    match = _PIECES.match(name)
    return int(match[2]) if match else None


def part_of_piece(name: str) -> str | None:
    """Return the part that a file of `piece_name` has pieces of; None for another name."""
    match = _PIECES.match(name)
    return match[1] if match else None


def step_of(path: Place) -> int | None:
    """Return the step that a snapshot's folder is named after; None for any other name."""
    match = _FOLDER.match(path.name)
    return int(match[1]) if match else None


def listing(folder: Place) -> list[tuple[int, Any]]:
    """Folders named as snapshots, good or not, newest step first; none if the folder does not exist."""
    if not isinstance(folder, Remote) and not folder.is_dir():
        return []
    steps = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None]
    return sorted(steps, reverse=True)


def entries(path: Place) -> dict[str, int | None]:
    """Return what a folder has: name -> bytes of a file, None for anything else."""
    if isinstance(path, Remote):
        return path.entries()
    return {file.name: file.stat().st_size if file.is_file() else None for file in path.iterdir()}


def size_bytes(path: Place) -> int:
    """Return the bytes of a file; an OSError if there is none."""
    return path.size_bytes() if isinstance(path, Remote) else path.stat().st_size


class Hasher(Protocol):
    """Hash function, as hashlib has it."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


def default_hash(*, in_memory: bool = False) -> str:
    """Return the fastest hash at hand: BLAKE3 (3.5 GB/s on one core), else SHA-256 (0.2 to 1.5 GB/s).

    Args:
        in_memory: of what never leaves the nodes' memory: XXH3 (7 GB/s), which finds damage and stops no forger.
    """
    packages = {HASH_IN_MEMORY: "xxhash"} if in_memory else {}
    packages["blake3"] = "blake3"
    return next((name for name, package in packages.items() if importlib.util.find_spec(package)), "sha256")


def hasher(name: str) -> Hasher:
    """Return a new digest.

    Raises:
        SnapshotError: the hash is unknown, or needs a package that is not installed.
    """
    if name == "sha256":
        return hashlib.sha256()
    if name not in HASHES:
        raise SnapshotError(f"{name} is not a hash that snapshots use", hint=f"known are {', '.join(HASHES)}")
    package = "xxhash" if name == HASH_IN_MEMORY else name
    try:
        made: Hasher = getattr(importlib.import_module(package), name)()
    except ImportError as exc:
        raise SnapshotError(f"{name} digests need the package {package}", hint=f"pip install {package}") from exc
    return made


def file_digest(path: Place, name: str, contents: memoryview | None = None) -> str:
    """Return the digest of a file's bytes.

    Args:
        path: the file.
        name: of the hash.
        contents: buffer of the size of the file, filled with its bytes. None: only the digest is needed.

    Raises:
        OSError: the file cannot be read.
    """
    state = hasher(name)
    chunk = memoryview(bytearray(CHUNK_BYTES)) if contents is None else contents[:CHUNK_BYTES]
    place = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            state.update(chunk[:count])
            if contents is not None:
                place += count
                chunk = contents[place : place + CHUNK_BYTES]
    return state.hexdigest()


def map_file(path: Path) -> memoryview:
    """Return the bytes of a file in memory (tmpfs) without a copy; changes to them stay with this process.

    They are right as long as no process writes to the file, and snapshots never change: a file gets its name when it is
    complete, and one that is removed stays until the last map of it is gone.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(bytearray())
        return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def digest_of(contents: memoryview, name: str) -> str:
    """Return the digest of bytes in memory."""
    state = hasher(name)
    for begin in range(0, len(contents), CHUNK_BYTES):
        state.update(contents[begin : begin + CHUNK_BYTES])
    return state.hexdigest()


def memory(size_bytes: int) -> memoryview:
    """Zeroed memory for a file's bytes, in huge pages where the system has them.

    Touching fresh memory 4 KiB at a time takes twice as long as reading a file that is in the cache.
    """
    if size_bytes == 0:
        return memoryview(bytearray())
    mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not on this kernel
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)


def commit_record(manifest: bytes, name: str) -> bytes:
    """Return the text of COMMIT for the text of a manifest."""
    state = hasher(name)
    state.update(manifest)
    return f"{name} {state.hexdigest()} {MANIFEST}\n".encode()
