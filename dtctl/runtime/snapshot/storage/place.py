"""Place of snapshots: a folder, or a URL for fsspec (s3://, gs://, abfs:// ...); only this file uses fsspec.

A `Remote` has as much of `pathlib.Path` as snapshots need, so that readers of snapshots need no special case. It has no
rename and no fsync: a store takes an object when its upload is closed, whole. Nothing is cached here, and a store that
does not answer is an error, never a missing file: a snapshot must not be passed over, or removed, because a link is
down.
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
"""Bytes that are uploaded at a time: large enough for 10,000 parts, which is all that S3 takes, to be 640 GB."""
FETCH_BYTES: Final = 1 << 24
"""Bytes that are fetched at a time,"""
FIRST_BYTES: Final = 1 << 20
"""and at first;"""
AHEAD: Final = 4
"""and how many of these at once, of each file."""
PATIENCE_S: Final = 300.0
"""Seconds that a store may take for one block. s3fs, for example, would wait as long as TCP retransmits."""
IMPATIENCE_S: Final = 15.0
"""And how long after it once did not answer: the next thing is to clear away, which can wait."""
KEY: Final = "train.snapshot.dir"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_SECRET = re.compile(r"(://[^/@]*):[^/@]*@")
_LOCAL: Final = ("file://", "local://")
_REFUSED: Final = ("sftp://", "ssh://")
_NO_CREDENTIALS: Final = "credentials come from the provider's own variables and files, on every node"


class _Store:
    """One of fsspec's filesystems, which is asked from a thread that can be left waiting."""

    def __init__(self, fs: Any) -> None:
        self.fs, self._answers = fs, True

    def ask(self, action: Callable[[Any], Any]) -> Any:
        """Return what comes of it; whatever it raises, and TimeoutError if nothing comes."""
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


class Remote:
    """A folder or a file at a URL."""

    __slots__ = ("_path", "_store", "_url")

    def __init__(self, store: _Store, path: str, url: str) -> None:
        """Store the arguments; nothing is requested yet.

        Args:
            store: that has it.
            path: in the store, without a slash at its end.
            url: in human-readable form.
        """
        self._store, self._path, self._url = store, path, url

    def __truediv__(self, name: str) -> Remote:
        return Remote(self._store, f"{self._path}/{name}", f"{self._url}/{name}")

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"Remote({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._url == self._url

    def __lt__(self, other: Remote) -> bool:
        return self._url < other._url

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def name(self) -> str:
        """Return its last word."""
        return self._url.rsplit("/", 1)[-1]

    def is_dir(self) -> bool:
        """Return whether there is anything below it."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        return self._kind() == "file"

    def exists(self) -> bool:
        """Return whether there is anything of this name."""
        return self._kind() is not None

    def entries(self) -> dict[str, int | None]:
        """Return what a folder has: name -> bytes of a file, None for a folder; nothing if there is no such folder."""
        try:
            rows = self._fresh("listed", lambda fs: fs.ls(self._path, detail=True))
        except FileNotFoundError:
            return {}
        sizes = {}
        for row in rows:
            path = row["name"].rstrip("/")
            if path.strip("/") != self._path.strip("/"):  # some stores have objects that stand for folders
                sizes[path.rsplit("/", 1)[-1]] = row["size"] if row["type"] == "file" else None
        return sizes

    def iterdir(self) -> Iterator[Remote]:
        """Return what a folder has."""
        return (self / name for name in self.entries())

    def size_bytes(self) -> int:
        """Return the bytes of a file.

        Raises:
            FileNotFoundError: there is none.
        """
        return int(self._fresh("looked at", lambda fs: fs.info(self._path))["size"])

    def modified_s(self) -> float:
        """Return when a file was written, in seconds since the epoch."""
        return float(self._fresh("looked at", lambda fs: fs.modified(self._path)).timestamp())

    def read_bytes(self) -> bytes:
        """Return all of a file; FileNotFoundError if there is none."""
        return bytes(self._asked("read", lambda fs: fs.cat_file(self._path)))

    def read_text(self) -> str:
        """Return all of a file; FileNotFoundError if there is none."""
        return self.read_bytes().decode()

    def open(self, mode: str = "rb", buffering: int = 0) -> _Download:
        """Return a file's bytes, once, from the first on; the arguments are there to be those of a Path."""
        if mode != "rb" or buffering:
            raise ValueError("files at URLs are written by `upload`")
        return _Download(self)

    def stretch(self, begin: int, end: int) -> bytes:
        """Some of a file's bytes.

        Raises:
            SnapshotError: they did not come, or not all of them.
        """
        data: bytes = self._asked("read", lambda fs: fs.cat_file(self._path, start=begin, end=end))
        if len(data) != end - begin:
            raise SnapshotError(f"{self} cannot be read: {len(data)} of {end - begin} bytes came", where=str(self))
        return data

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:  # noqa: ARG002  # a Path's arguments
        """Make a folder where the store has any; others have buckets, which are not ours to make, and names."""
        if self._path.startswith("/"):
            self._asked("made", lambda fs: fs.makedirs(self._path, exist_ok=True))

    def touch(self) -> None:
        """Write an empty file."""
        with self.upload():
            pass

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove a file."""
        try:
            self._asked("removed", lambda fs: fs.rm_file(self._path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Remove a folder with all that is below it."""
        with contextlib.suppress(FileNotFoundError):
            self._asked("removed", lambda fs: fs.rm(self._path, recursive=True))

    @contextlib.contextmanager
    def upload(self) -> Iterator[_Upload]:
        """A new file, which is there, whole, when the block has ended without an error; else not at all.

        Raises:
            SnapshotError: the store did not take all of it.
        """
        file = self._asked("written", lambda fs: fs.open(self._path, "wb", block_size=BLOCK_BYTES))
        upload = _Upload(self, file)
        try:
            yield upload
            self._asked("written", lambda _: file.close())
        except BaseException:
            # fsspec would upload what it has so far, when the file is collected at the latest.
            with contextlib.suppress(Exception):
                file.closed = True
            with contextlib.suppress(Exception):
                self._store.ask(lambda _: file.discard())
            raise
        size = self.size_bytes()
        if size != upload.size_bytes:
            raise SnapshotError(f"{self} was written with {upload.size_bytes} bytes and has {size}")

    def _kind(self) -> str | None:
        try:
            return str(self._fresh("looked at", lambda fs: fs.info(self._path))["type"])
        except FileNotFoundError:
            return None

    def _fresh(self, verb: str, action: Callable[[Any], Any]) -> Any:
        """Read as `_asked` does, what others may have changed."""
        self._store.fs.invalidate_cache()
        return self._asked(verb, action)

    def _asked(self, verb: str, action: Callable[[Any], Any]) -> Any:
        """Return the store's answer, and reduce the errors of its libraries to two.

        Raises:
            FileNotFoundError: the store reports that there is nothing of this name.
            SnapshotError: any other error, which is no sign of a damaged snapshot.
        """
        try:
            return self._store.ask(action)
        except FileNotFoundError as exc:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(self)) from exc
        except Exception as exc:  # each library has its own
            reason = " ".join(_SECRET.sub(r"\1:...@", str(exc)).split())[:400]
            raise SnapshotError(
                f"{self} cannot be {verb}: {type(exc).__name__}: {reason}",
                where=str(self),
                hint=f"see whether the store can be reached from here; {_NO_CREDENTIALS}",
            ) from exc


class _Download:
    """An open file, as far as readers of snapshots need one: from the first byte to the last, some blocks ahead."""

    def __init__(self, place: Remote) -> None:
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
        """Some of the next bytes, for which there is room. Returns how many; 0 at the end."""
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
            self._coming.append(self._pool.submit(self._place.stretch, self._asked_for, end))
            self._asked_for = end
        return memoryview(self._coming.popleft().result() if self._coming else b"")


class _Upload:
    """A file that is being written."""

    def __init__(self, place: Remote, file: Any) -> None:
        self._place, self._file = place, file
        self.size_bytes = 0

    def write(self, chunk: bytes | memoryview) -> int:
        """Take all of it."""
        self._place._asked("written", lambda _: self._file.write(bytes(chunk)))
        self.size_bytes += len(chunk)
        return len(chunk)


Place: TypeAlias = Path | Remote
"""Folder or file, on any kind of storage."""


def is_url(text: str) -> bool:
    """Return whether this names a place by a URL; one of this machine's files is a folder all the same."""
    return bool(_URL.match(text)) and not text.startswith(_LOCAL)


def place(text: str | Place) -> Place:
    """Return the place that a path or a URL names; nothing is asked for there.

    Raises:
        SpecError: a URL with a password, or of a kind that is not known.
        SnapshotError: a package is missing.
    """
    if not isinstance(text, str):
        return text
    if not is_url(text):
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
    except Exception as exc:  # some connect here
        raise SnapshotError(f"{text} cannot be reached: {exc}", where=KEY, hint=_NO_CREDENTIALS) from exc
    return Remote(_Store(fs), path.rstrip("/"), text)
