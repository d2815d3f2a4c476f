"""Digests of files, remembered by what `stat` said when they were read, so that an unchanged tree is not read again.

As in git, a remembered digest counts only if the file was last changed before the scan that read it began: a change
within the same tick of the file system's clock could not be told from none ("racy git", git's
Documentation/technical/racy-git.txt). The tick is taken from the clock of the file system, which on a file server is
not that of this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path

from dtctl import folders

TICK_NS = 20_000_000
"""No kernel in use updates the time of its file systems less often than 50 times a second."""
COARSE_TICK_NS = 2_000_000_000
"""File systems that keep whole seconds, or two (FAT)."""
_PRIVATE_KEY = (b"-----BEGIN ", b"PRIVATE KEY", b"PuTTY-User-Key-File-")
_CHUNK_BYTES = 1 << 20
CACHE_BYTES = 256 << 20
"""Of what is remembered: some million files."""


class Digests:
    """Digests of the files of one tree. Use as a context: what was learnt is written when it ends well."""

    def __init__(self, path: Path | None) -> None:
        """Read what is remembered.

        Args:
            path: where that is kept; None to read every file and remember nothing. A file that is missing or damaged
                costs time and nothing else.
        """
        self._path = path
        self._partial: Path | None = None
        self._began_ns = 0
        self._stored: dict[str, list[object]] = {}
        self._current: dict[str, list[object]] = {}
        self._changed = False

    def __enter__(self) -> Digests:  # noqa: PYI034 - Self is not in Python 3.10
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                stored = json.loads(folders.read_regular(str(self._path), CACHE_BYTES))
                self._stored = {str(key): list(row) for key, row in stored["files"].items()}
            with contextlib.suppress(OSError):  # a disk that is full or read-only must not keep a job from running
                # Step by step: what `parents` makes has the mode that everybody else's umask gives.
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

    def of(self, path: bytes, full: bytes, info: os.stat_result) -> tuple[str, bool]:
        """Digest of a file, 64 hexadecimal digits, and whether it is somebody's private key.

        Args:
            path: name of the file in the tree.
            full: where it is.
            info: what `lstat` said of it just now.

        Raises:
            OSError: it cannot be read.
        """
        key = path.decode("latin-1")
        seal = [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
        row = self._stored.get(key)
        if row is not None and row[:4] == seal and len(row) == 6:
            digest, private = str(row[4]), bool(row[5])
        else:
            digest, private = _read(full)
            self._changed = True
        tick_ns = TICK_NS if info.st_ctime_ns % 1_000_000_000 else COARSE_TICK_NS
        if info.st_ctime_ns < self._began_ns - tick_ns:
            self._current[key] = [*seal, digest, private]
        return digest, private


def _read(path: bytes) -> tuple[str, bool]:
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
