"""Place of snapshots: a folder, or a URL for fsspec (s3://, gs://, abfs:// ...). Only this file uses fsspec.

`RemotePath` has the methods of `pathlib.Path` that snapshots need, so that their readers need no special case. It has
no rename and no fsync: a store accepts an object when its upload is closed, completely. This module caches nothing. A
store
that does not answer is an error, never a missing file: a snapshot must not be passed over or removed because a
connection is down.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dtctl.errors import SnapshotError, SpecError

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK_BYTES: Final = 1 << 26
"""Bytes that are uploaded at a time; 10,000 parts, the most that S3 accepts, make 640 GB."""
FETCH_BYTES: Final = 1 << 24
"""Bytes that are fetched at a time."""
FIRST_BYTES: Final = 1 << 20
"""Bytes of the first request for a file."""
AHEAD: Final = 4
"""Number of requests for one file that run at the same time."""
PATIENCE_S: Final = 300.0
"""Seconds that a store may take for one block. s3fs, for example, would wait as long as TCP retransmits."""
IMPATIENCE_S: Final = 15.0
"""Seconds that a store may take after it did not answer once, since only removals follow, which can wait."""
KEY: Final = "train.snapshot.dir"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_SECRET = re.compile(r"(://[^/@]*):[^/@]*@")
_LOCAL: Final = ("file://", "local://")
_REFUSED: Final = ("sftp://", "ssh://")
_NO_CREDENTIALS: Final = "credentials come from the provider's own variables and files, on every node"


class _RemoteStore:
    """File system of fsspec that is called from a separate thread, so that a call can be given up."""

    def __init__(self, fs: Any) -> None:
        self.fs, self._answers = fs, True

    def call_store(self, action: Callable[[Any], Any]) -> Any:
        """Return the result of an action, or raise its error; raise TimeoutError if it does not end in time."""
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((action(self.fs), None))
            except BaseException as exc:  # noqa: BLE001  # raised again where it is waited for
                answers.put((None, exc))

        limit_s = PATIENCE_S if self._answers else IMPATIENCE_S
        threading.Thread(target=run, name="store", daemon=True).start()
        try:
            result, error = answers.get(timeout=limit_s)
        except queue.Empty:
            self._answers = False
            raise TimeoutError(f"no answer for {limit_s:.0f} s") from None
        self._answers = True
        if error is not None:
            raise error
        return result


class RemotePath:
    """A folder or a file at a URL."""

    __slots__ = ("_path", "_store", "_url")

    def __init__(self, store: _RemoteStore, path: str, url: str) -> None:
        """Store the arguments, without a request.

        Args:
            store: store of the folder or file.
            path: path in the store, without a slash at its end.
            url: URL in human-readable form.
        """
        self._store, self._path, self._url = store, path, url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._store, f"{self._path}/{name}", f"{self._url}/{name}")

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"Remote({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other._url == self._url

    def __lt__(self, other: RemotePath) -> bool:
        return self._url < other._url

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def name(self) -> str:
        """Return the last component of the path."""
        return self._url.rsplit("/", 1)[-1]

    def is_dir(self) -> bool:
        """Return whether any object exists below this path."""
        return self._read_path_type() == "directory"

    def is_file(self) -> bool:
        """Return whether an object of this name exists."""
        return self._read_path_type() == "file"

    def exists(self) -> bool:
        """Return whether an object or a folder of this name exists."""
        return self._read_path_type() is not None

    def entries(self) -> dict[str, int | None]:
        """Return the entries of a folder: name -> bytes of a file, None for a folder; empty if there is no folder."""
        try:
            rows = self._query_store_uncached("listed", lambda fs: fs.ls(self._path, detail=True))
        except FileNotFoundError:
            return {}
        sizes = {}
        for row in rows:
            path = row["name"].rstrip("/")
            if path.strip("/") != self._path.strip("/"):  # some stores have objects that stand for folders
                sizes[path.rsplit("/", 1)[-1]] = row["size"] if row["type"] == "file" else None
        return sizes

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the entries of a folder."""
        return (self / name for name in self.entries())

    def size_bytes(self) -> int:
        """Return the bytes of a file.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        return int(self._query_store_uncached("looked at", lambda fs: fs.info(self._path))["size"])

    def modified_s(self) -> float:
        """Return the time when a file was written, in seconds since the epoch."""
        return float(self._query_store_uncached("looked at", lambda fs: fs.modified(self._path)).timestamp())

    def read_bytes(self) -> bytes:
        """Return the whole content of a file; raise FileNotFoundError if it does not exist."""
        return bytes(self._query_store("read", lambda fs: fs.cat_file(self._path)))

    def read_text(self) -> str:
        """Return the whole text of a file; raise FileNotFoundError if it does not exist."""
        return self.read_bytes().decode()

    def open(self, mode: str = "rb", buffering: int = 0) -> _Download:
        """Return a reader of a file's bytes from the first to the last; the arguments are those of `Path.open`."""
        if mode != "rb" or buffering:
            raise ValueError("files at URLs are written by `upload`")
        return _Download(self)

    def read_range(self, begin: int, end: int) -> bytes:
        """Return a range of a file's bytes.

        Raises:
            SnapshotError: the bytes did not arrive, or not all of them.
        """
        data: bytes = self._query_store("read", lambda fs: fs.cat_file(self._path, start=begin, end=end))
        if len(data) != end - begin:
            raise SnapshotError(f"{self} cannot be read: {len(data)} of {end - begin} bytes came", where=str(self))
        return data

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:  # noqa: ARG002  # a Path's arguments
        """Make a folder if the store has folders; object stores have only names, and buckets that users make."""
        if self._path.startswith("/"):
            self._query_store("made", lambda fs: fs.makedirs(self._path, exist_ok=True))

    def touch(self) -> None:
        """Write an empty file."""
        with self.upload():
            pass

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove a file."""
        try:
            self._query_store("removed", lambda fs: fs.rm_file(self._path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Remove a folder with all that is below it."""
        with contextlib.suppress(FileNotFoundError):
            self._query_store("removed", lambda fs: fs.rm(self._path, recursive=True))

    @contextlib.contextmanager
    def upload(self) -> Iterator[_Upload]:
        """Open a new file, which is complete when the block ends without an error; else it is not created.

        Raises:
            SnapshotError: the store did not accept all bytes.
        """
        file = self._query_store("written", lambda fs: fs.open(self._path, "wb", block_size=BLOCK_BYTES))
        upload = _Upload(self, file)
        try:
            yield upload
            self._query_store("written", lambda _: file.close())
        except BaseException:
            # Otherwise fsspec would upload the bytes so far, at the latest when the file is garbage collected.
            with contextlib.suppress(Exception):
                file.closed = True
            with contextlib.suppress(Exception):
                self._store.call_store(lambda _: file.discard())
            raise
        size = self.size_bytes()
        if size != upload.size_bytes:
            raise SnapshotError(f"{self} was written with {upload.size_bytes} bytes and has {size}")

    def _read_path_type(self) -> str | None:
        try:
            return str(self._query_store_uncached("looked at", lambda fs: fs.info(self._path))["type"])
        except FileNotFoundError:
            return None

    def _query_store_uncached(self, verb: str, action: Callable[[Any], Any]) -> Any:
        """Query as `_query_store` does, without fsspec's cache, since other processes may change the store."""
        self._store.fs.invalidate_cache()
        return self._query_store(verb, action)

    def _query_store(self, verb: str, action: Callable[[Any], Any]) -> Any:
        """Return the store's answer, and map the errors of its libraries to two.

        Raises:
            FileNotFoundError: the store reports that there is nothing of this name.
            SnapshotError: any other error, which does not mean a damaged snapshot.
        """
        try:
            return self._store.call_store(action)
        except FileNotFoundError as exc:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(self)) from exc
        except Exception as exc:  # each library has its own errors
            reason = " ".join(_SECRET.sub(r"\1:...@", str(exc)).split())[:400]
            raise SnapshotError(
                f"{self} cannot be {verb}: {type(exc).__name__}: {reason}",
                where=str(self),
                hint=f"check whether the store can be reached from here; {_NO_CREDENTIALS}",
            ) from exc


class _Download:
    """An open file as readers of snapshots need it: read from the first byte to the last, some blocks ahead."""

    def __init__(self, place: RemotePath) -> None:
        self._place, self._size_bytes = place, place.size_bytes()
        self._asked_for = 0
        self._coming: deque[Future[bytes]] = deque()
        self._block = memoryview(b"")
        self._pool = ThreadPoolExecutor(max_workers=AHEAD, thread_name_prefix="blocks")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def read(self, size: int) -> bytes:
        """Return the next bytes; fewer at the end."""
        buffer = bytearray(size)
        place = memoryview(buffer)
        while place and (count := self.readinto(place)):
            place = place[count:]
        return bytes(buffer[: size - len(place)])

    def readinto(self, chunk: memoryview) -> int:
        """Fill a chunk with the next bytes; return their number, 0 at the end."""
        if not self._block:
            self._block = self._next_block()
        count = min(len(chunk), len(self._block))
        chunk[:count], self._block = self._block[:count], self._block[count:]
        return count

    def _next_block(self) -> memoryview:
        # The first request is small, since a caller may need only the beginning.
        ahead, size = (AHEAD, FETCH_BYTES) if self._asked_for else (1, FIRST_BYTES)
        while len(self._coming) < ahead and self._asked_for < self._size_bytes:
            end = min(self._asked_for + size, self._size_bytes)
            self._coming.append(self._pool.submit(self._place.read_range, self._asked_for, end))
            self._asked_for = end
        return memoryview(self._coming.popleft().result() if self._coming else b"")


class _Upload:
    """A file that is being uploaded."""

    def __init__(self, place: RemotePath, file: Any) -> None:
        self._place, self._file = place, file
        self.size_bytes = 0

    def write(self, chunk: bytes | memoryview) -> int:
        """Write all bytes."""
        self._place._query_store("written", lambda _: self._file.write(bytes(chunk)))
        self.size_bytes += len(chunk)
        return len(chunk)


Place: TypeAlias = Path | RemotePath
"""Folder or file, on any kind of storage."""


def is_remote_url(text: str) -> bool:
    """Return whether a text names a remote place; a URL of a local file does not."""
    return bool(_URL.match(text)) and not text.startswith(_LOCAL)


def parse_place(text: str | Place) -> Place:
    """Return the place that a path or a URL names, without a request to it.

    Raises:
        SpecError: the URL contains a password, or has an unknown scheme.
        SnapshotError: a package is missing.
    """
    if not isinstance(text, str):
        return text
    if not is_remote_url(text):
        for scheme in _LOCAL:
            text = text.removeprefix(scheme)
        return Path(text).expanduser()
    shown = _SECRET.sub(r"\1:...@", text)
    if shown != text or "?" in text:
        raise SpecError(f"{shown.split('?')[0]} has a secret in it", where=KEY, hint=_NO_CREDENTIALS)
    if text.lower().startswith(_REFUSED):
        reason = "fsspec takes the key of any machine that answers in the name of this one"
        raise SpecError(f"{text} is not used: {reason}", where=KEY, hint="mount it (sshfs), and name the folder")
    if "::" in text:
        raise SpecError(f"{text} is one file system on top of another", where=KEY, hint="use the store's own URL")
    try:
        from fsspec.core import url_to_fs
    except ImportError as exc:
        raise SnapshotError(f"{text} needs the package fsspec", where=KEY, hint="pip install fsspec") from exc
    text = text.rstrip("/")
    try:
        fs, path = url_to_fs(text)
    except ImportError as exc:
        package = exc.__cause__.name if isinstance(exc.__cause__, ImportError) else exc.name
        raise SnapshotError(f"{text} needs a package: {exc}", where=KEY, hint=f"pip install {package}") from exc
    except ValueError as exc:
        raise SpecError(f"{text}: {exc}", where=KEY, hint="see fsspec's list of protocols") from exc
    except Exception as exc:  # some libraries connect here
        raise SnapshotError(f"{text} cannot be reached: {exc}", where=KEY, hint=_NO_CREDENTIALS) from exc
    return RemotePath(_RemoteStore(fs), path.rstrip("/"), text)
