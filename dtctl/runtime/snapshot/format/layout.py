"""Layout of a snapshot on disk: names, manifest, commit record, digests of files."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import importlib
import importlib.util
import json
import mmap
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dtctl import folders
from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot.format.headers import MalformedFile
from dtctl.runtime.snapshot.storage.place import Place, RemotePath

FORMAT: Final = 2
"""Format of snapshots whose parts are whole files."""
FORMAT_SPREAD: Final = 3
"""Format of snapshots whose parts are in several files, and each file has the pieces of one worker."""
MANIFEST: Final = "manifest.json"
COMMIT: Final = "COMMIT"
RECORD_BYTES: Final = 64 << 20
"""Largest size of a manifest or a commit record; a longer file is invalid."""
HASH_IN_MEMORY: Final = "xxh3_128"
HASHES: Final = ("blake3", "sha256", HASH_IN_MEMORY)
PART_SUFFIX: Final = ".safetensors"
DRAFT_SUFFIX: Final = ".draft"
"""Suffix of folders that are not yet renamed to their final names, or never were; they begin with a dot."""
CHUNK_BYTES: Final = 1 << 18
"""Bytes that are hashed and written, or read and hashed, at a time: they stay in the cache in between."""

_PIECES = re.compile(r"(.+)\.(\d{5,})" + re.escape(PART_SUFFIX) + r"\Z")
_FOLDER = re.compile(r"step-(\d{8,})(?:\.\d{8}T\d{6}-[0-9a-f]{8})?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """A file of a snapshot, as the manifest describes it."""

    size_bytes: int
    digest: str
    """Hexadecimal digest by the manifest's hash."""
    part: str | None = None
    """Part of which the file has pieces. None: the file has a whole part, and its name."""

    def document(self) -> dict[str, Any]:
        """Return the record as JSON."""
        entry: dict[str, Any] = {"size_bytes": self.size_bytes, "digest": self.digest}
        return entry if self.part is None else {**entry, "part": self.part}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest of a snapshot."""

    step: int
    """Optimizer steps done before the snapshot."""
    hash: str
    """Hash of the files: blake3 or sha256; xxh3_128 for a snapshot in memory."""
    facts: Mapping[str, Any]
    """The loop's own state, and the conditions of the run; JSON."""
    files: Mapping[str, SnapshotFile]
    text: bytes = b""
    """Text that the manifest was read from; the commit record has the digest of this text."""

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
        """Return the manifest in a text whose digest is verified.

        Raises:
            MalformedFile: the text is not a manifest.
            SnapshotError: the format is of a later version.
        """
        try:
            document = json.loads(text)
            form = document["format"]
        except (ValueError, LookupError, TypeError, RecursionError) as exc:
            raise MalformedFile(f"{MANIFEST} is malformed: {exc}") from None
        if type(form) is not int:
            raise MalformedFile(f"{MANIFEST} is malformed: its format is {ascii(form)[:80]}")
        if form not in (FORMAT, FORMAT_SPREAD):
            raise SnapshotError(
                f"the snapshot has format {form}, and this version reads {FORMAT} and {FORMAT_SPREAD}",
                where=where,
                hint="resume with the version of dtctl that wrote it, or later",
            )
        try:
            files = {name: _parse_file_entry(name, entry) for name, entry in document["files"].items()}
            manifest = cls(
                step=document["step"], hash=document["hash"], facts=document["facts"], files=files, text=bytes(text)
            )
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise MalformedFile(f"{MANIFEST} is malformed: {exc}") from None
        if type(manifest.step) is not int or manifest.hash not in HASHES or not isinstance(manifest.facts, dict):
            raise MalformedFile(f"{MANIFEST} is malformed: step, hash or facts are of another kind")
        return manifest


def _parse_file_entry(name: str, entry: Mapping[str, Any]) -> SnapshotFile:
    file = SnapshotFile(**entry)
    # A name must not be a path, so that only files in the snapshot's own folder are read.
    right = folders.is_name(name) and name not in (MANIFEST, COMMIT)
    right = right and type(file.size_bytes) is int and file.size_bytes >= 0
    if not (right and isinstance(file.digest, str) and (file.part is None or folders.is_name(file.part))):
        raise ValueError(f"its file {ascii(name)[:80]}")
    return file


def build_snapshot_path(folder: Place, step: int) -> Place:
    """Return the path of a step's snapshot on disk."""
    return folder / f"step-{step:08d}"


def build_attempt_name(step: int) -> str:
    """Return the name of a snapshot's folder in a store without renaming: `step-00000100.20261121T195221-5f0c93d1`.

    No two attempts to write have the same name. So files that a dead writer has left, or still sends, never become part
    of another snapshot, and committed files never change. The names of a step sort by time.
    """
    now = dt.datetime.now(dt.timezone.utc)
    return f"step-{step:08d}.{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def build_piece_name(part: str, rank: int) -> str:
    """Return the name, without suffix, of the file with one worker's pieces of a part."""
    return f"{part}.{rank:05d}"


def parse_piece_rank(name: str) -> int | None:
    """Return the rank of the worker whose pieces a file has; None for a whole part."""
    match = _PIECES.match(name)
    return int(match[2]) if match else None


def parse_piece_name(name: str) -> str | None:
    """Return the part whose pieces a file has, by its name; None for a name that is not from `build_piece_name`."""
    match = _PIECES.match(name)
    return match[1] if match else None


def parse_snapshot_step(path: Place) -> int | None:
    """Return the step in the name of a snapshot's folder; None for any other name."""
    match = _FOLDER.match(path.name)
    return int(match[1]) if match else None


def list_step_folders(folder: Place) -> list[tuple[int, Any]]:
    """Return the folders with names of snapshots, good or not, newest step first; empty if `folder` does not exist."""
    if not isinstance(folder, RemotePath) and not folder.is_dir():
        return []
    steps = [(step, path) for path in folder.iterdir() if (step := parse_snapshot_step(path)) is not None]
    return sorted(steps, reverse=True)


def list_folder_entries(path: Place) -> dict[str, int | None]:
    """Return the entries of a folder: name -> bytes of a file, None for anything else."""
    if isinstance(path, RemotePath):
        return path.entries()
    return {file.name: file.stat().st_size if file.is_file() else None for file in path.iterdir()}


def read_file_size(path: Place) -> int:
    """Return the size of a file in bytes; raise OSError if it does not exist."""
    return path.size_bytes() if isinstance(path, RemotePath) else path.stat().st_size


class Hasher(Protocol):
    """Hash function with the interface of hashlib."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Add bytes to the hash."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


def choose_hash(*, in_memory: bool = False) -> str:
    """Return the fastest available hash: BLAKE3 (3.5 GB/s on one core), else SHA-256 (0.2 to 1.5 GB/s).

    Args:
        in_memory: True for files that never leave the nodes' memory: XXH3 (7 GB/s), which detects damage but no
            forgery.
    """
    packages = {HASH_IN_MEMORY: "xxhash"} if in_memory else {}
    packages["blake3"] = "blake3"
    return next((name for name, package in packages.items() if importlib.util.find_spec(package)), "sha256")


def build_hasher(name: str) -> Hasher:
    """Return a new hasher.

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


def compute_file_digest(path: Place, name: str, contents: memoryview | None = None) -> str:
    """Return the digest of a file's bytes.

    Args:
        path: the file.
        name: name of the hash.
        contents: buffer of the size of the file, which is filled with its bytes. None: only the digest is needed.

    Raises:
        OSError: the file cannot be read.
    """
    state = build_hasher(name)
    chunk = memoryview(bytearray(CHUNK_BYTES)) if contents is None else contents[:CHUNK_BYTES]
    place = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            state.update(chunk[:count])
            if contents is not None:
                place += count
                chunk = contents[place : place + CHUNK_BYTES]
    return state.hexdigest()


def compute_bytes_digest(contents: memoryview, name: str) -> str:
    """Return the digest of bytes in memory."""
    state = build_hasher(name)
    for begin in range(0, len(contents), CHUNK_BYTES):
        state.update(contents[begin : begin + CHUNK_BYTES])
    return state.hexdigest()


def allocate_zeroed_memory(size_bytes: int) -> memoryview:
    """Return zeroed memory for a file's bytes, in huge pages where the system has them.

    Touching new memory in pages of 4 KiB takes twice as long as reading a file that is in the cache.
    """
    if size_bytes == 0:
        return memoryview(bytearray())
    mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # this kernel has no huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)


def commit_record(manifest: bytes, name: str) -> bytes:
    """Return the text of COMMIT for the text of a manifest."""
    state = build_hasher(name)
    state.update(manifest)
    return f"{name} {state.hexdigest()} {MANIFEST}\n".encode()
