"""Bringing a run's outputs from its nodes: what is not here yet, each file checked by its SHA-256.

A node is not trusted: it decides what is in the files below the folder that is its own here, and nothing else. Names
are names of files, no link is followed, one that leads out of the folder is not made, and no more bytes are taken than
the node announced and this machine has room for.
A file arrives under a name of its own (`.fetch-...`), which an interrupted one keeps: the next fetch asks for the rest
of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from dtctl import folders
from dtctl.errors import DtctlError, LaunchError, NodeError, TransferError
from dtctl.launch.control.link import NodeLink, open_node, quoted, require_known
from dtctl.supervisor import frames
from dtctl.supervisor.messages.base import Quit
from dtctl.supervisor.messages.outputs import (
    FILES,
    DigestFiles,
    DigestsEnd,
    FileDigest,
    FileSent,
    ListOutputs,
    OutputLinks,
    OutputRows,
    OutputsListed,
    SendFiles,
)
from dtctl.supervisor.receive import leads_out
from dtctl.transport.base import Target, Transport
from dtctl.transport.fanout import fan_out

SILENCE_S = 600.0
"""Seconds that a node may be silent: it may have to read a large file before it can report its digest."""
MARGIN_BYTES = 64 << 20
"""Bytes of this machine's disk that stay free."""
PARTIAL: Final = ".fetch-"
READ_BYTES = 1 << 20
BATCH = 10_000
"""Files that one request names, which has to fit into a frame."""
END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSource:
    """One node of a run."""

    target: Target
    python: str | None
    run_dir: str
    """Folder of the run there; may begin with `~`."""


@dataclass(slots=True, kw_only=True)
class Fetched:
    """Files that came from one node."""

    files: int = 0
    """Brought now."""
    bytes: int = 0
    """Bytes that were sent for them."""
    unchanged: int = 0
    """Files that were here already."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be brought, a phrase each."""
    left_out: list[str] = field(default_factory=list)
    """Links that lead out of the working folder, and were not made, a phrase each."""
    is_there: bool = True
    """True if the node has a working folder of the run."""


def fetch(
    sources: Sequence[FetchSource],
    transport: Transport,
    *,
    paths: Sequence[str],
    into: Path,
    progress: Callable[[str, int, int], None] = lambda _node, _done, _total: None,
) -> dict[str, Fetched | DtctlError]:
    """Fetch outputs from all nodes at once; return node -> what came, or the error.

    Args:
        sources: the run's nodes.
        transport: how to reach them.
        paths: paths to fetch, relative to the working folder, or absolute; empty: all that the run's programs wrote.
        into: folder here; a node's outputs come into a folder below it with the node's name.
        progress: called with a node, bytes that came and bytes that are to come.
    """

    def fetch_one(source: FetchSource) -> Fetched:
        name, first = source.target.name, ListOutputs(run_dir=source.run_dir, paths=list(paths))
        with (
            open_node(transport, source.target, first, python=source.python, silence_s=SILENCE_S) as link,
            _private_folder(into, name) as folder,
        ):
            return _Fetch(link, folder, lambda done, total: progress(name, done, total)).run()

    return fan_out({source.target.name: source for source in sources}, fetch_one)


@contextlib.contextmanager
def _private_folder(into: Path, node: str) -> Iterator[int]:
    """The folder of a node's files here, opened.

    Raises:
        LaunchError: it cannot be made, or is a link.
    """
    try:
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        top = folders.open_folder(str(into))
        try:
            folder = _subfolder(top, node)
        finally:
            os.close(top)
    except OSError as exc:
        raise LaunchError(f"the outputs cannot be stored: {exc.strerror}", where=str(into / node)) from exc
    try:
        yield folder
    finally:
        os.close(folder)


def _subfolder(parent: int, name: str) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    return folders.open_folder(name, parent)


class _Begun(NamedTuple):
    """Part of a file that is already here."""

    length: int
    is_whole: bool
    """True if it has its name, rather than being on its way."""


class _Fetch:
    """The talk with one node."""

    def __init__(self, link: NodeLink, folder: int, progress: Callable[[int, int], None]) -> None:
        self.link = link
        self.folder = folder
        self.progress = progress
        self.rows: list[tuple[str, int]] = []
        self.links: dict[str, str] = {}
        self.result = Fetched()

    def run(self) -> Fetched:
        """Fetch everything, from the list to the last file."""
        self._read_rows()
        begun_files = {
            index: begun for index, (path, size) in enumerate(self.rows) if (begun := self._here(path, size))
        }
        digests = self._digests([(index, begun.length) for index, begun in begun_files.items()])
        missing = []
        for index, (path, _) in enumerate(self.rows):
            begun = begun_files.get(index)
            is_good = begun is not None and digests.get(index) == self._digest(path, begun)
            if begun is not None and is_good and begun.is_whole:
                self.result.unchanged += 1
            else:
                missing.append((index, begun.length if begun is not None and is_good else 0))
        self._require_room(sum(self.rows[index][1] - offset for index, offset in missing))
        self._receive(missing)
        self._make_links()
        self.link.send(Quit())
        self.link.stream.exit_status(END_S)
        return self.result

    # -- what there is ------------------------------------------------------------------------------------------------

    def _read_rows(self) -> None:
        paths: set[str] = set()
        while True:
            answer = self.link.expect(OutputRows, OutputLinks, OutputsListed)
            if isinstance(answer, OutputsListed):
                self.result.is_there = answer.is_there
                if answer.unnameable:
                    self.result.problems.append(
                        f"{answer.unnameable} files whose names hold control characters or are not UTF-8"
                    )
                break
            if isinstance(answer, OutputRows):
                self.rows += answer.rows
            elif isinstance(answer, OutputLinks):
                self.links.update(answer.rows)
            for path, _ in answer.rows if isinstance(answer, OutputRows | OutputLinks) else ():
                self._require_path(path)
                if path in paths or len(paths) >= FILES:
                    raise NodeError("the node listed one file twice, or too many", node=self.link.node)
                paths.add(path)
        if any(str(parent) in paths for path in paths for parent in PurePosixPath(path).parents):
            raise NodeError("the node listed a file as a folder, too", node=self.link.node)

    def _require_path(self, path: str) -> None:
        parts = path.split("/")
        if not all(folders.is_name(part) and not part.startswith(PARTIAL) for part in parts):
            raise NodeError(f"the node listed {quoted(path)}, which is no path of a file", node=self.link.node)

    def _digests(self, files: list[tuple[int, int]]) -> dict[int, str]:
        """Return what the node's files hash to, of each as many bytes as are here."""
        lengths, digests = dict(files), {}
        for begin in range(0, len(files), BATCH):
            self.link.send(DigestFiles(files=files[begin : begin + BATCH]))
            while isinstance(answer := self.link.expect(FileDigest, DigestsEnd), FileDigest):
                require_known(answer.index, lengths, subject="the digest of file", node=self.link.node)
                digests[answer.index] = answer.digest
        return digests

    # -- what is here -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _parent(self, path: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """The folder that a file lies in, reached from the node's own without following a link, and the file's name."""
        *above, name = path.split("/")
        folder = os.dup(self.folder)
        try:
            for part in above:
                inner = _subfolder(folder, part) if create else folders.open_folder(part, folder)
                os.close(folder)
                folder = inner
            yield folder, name
        finally:
            os.close(folder)

    def _here(self, path: str, size: int) -> _Begun | None:
        """Return what is here of a file of this size; None when that is of no use."""
        for is_whole in (True, False):
            with contextlib.suppress(OSError), self._parent(path) as (folder, name):
                info = os.stat(name if is_whole else _partial(name), dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) and (info.st_size == size if is_whole else 0 < info.st_size <= size):
                    return _Begun(info.st_size, is_whole)
        return None

    def _digest(self, path: str, begun: _Begun) -> str:
        total = hashlib.sha256()
        with self._parent(path) as (folder, name):
            fd = os.open(name if begun.is_whole else _partial(name), os.O_RDONLY | folders.NO_LINK, dir_fd=folder)
            with os.fdopen(fd, "rb") as file:
                while data := file.read(READ_BYTES):
                    total.update(data)
        return total.hexdigest()

    def _require_room(self, need: int) -> None:
        free = os.fstatvfs(self.folder)
        available = free.f_bavail * free.f_frsize - MARGIN_BYTES
        if need > available:
            raise LaunchError(
                f"{need >> 20} MiB are to come from {self.link.node}, and {max(0, available) >> 20} MiB are free here",
                hint="name a smaller part as PATH, or another disk as `--out DIR`",
            )

    # -- bringing -----------------------------------------------------------------------------------------------------

    def _receive(self, missing: list[tuple[int, int]]) -> None:
        total = sum(self.rows[index][1] - offset for index, offset in missing)
        for position, (index, offset) in enumerate(missing):
            if position % BATCH == 0:
                self.link.send(SendFiles(files=missing[position : position + BATCH]))
            try:
                self._receive_one(index, offset, total)
            except OSError as exc:
                raise LaunchError(
                    f"{self.rows[index][0]} of {self.link.node} cannot be stored: {exc.strerror}",
                    hint="what has come stays; fetch again to go on from there",
                ) from exc

    def _make_links(self) -> None:
        """Make the symbolic links, each to a place in the node's own folder."""
        encoded = {os.fsencode(path): os.fsencode(target) for path, target in self.links.items()}
        for path, target in self.links.items():
            if leads_out(os.fsencode(path), os.fsencode(target), encoded):
                self.result.left_out.append(f"{path}: the link leads out of the working folder, to {quoted(target)}")
                continue
            try:
                with self._parent(path, create=True) as (folder, name):
                    if _link_at(folder, name) == target:
                        self.result.unchanged += 1
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(_partial(name), dir_fd=folder)
                    os.symlink(target, _partial(name), dir_fd=folder)
                    os.replace(_partial(name), name, src_dir_fd=folder, dst_dir_fd=folder)
                    self.result.files += 1
            except OSError as exc:
                self.result.problems.append(f"{path}: {exc.strerror}")

    def _receive_one(self, index: int, offset: int, total: int) -> None:
        path, size = self.rows[index]
        digest = hashlib.sha256()
        with self._parent(path, create=True) as (folder, name):
            fd = os.open(_partial(name), os.O_RDWR | os.O_CREAT | folders.NO_LINK, 0o600, dir_fd=folder)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            file.truncate(offset)
            while file.tell() < offset and (data := file.read(min(offset - file.tell(), READ_BYTES))):
                digest.update(data)
            received = offset
            while isinstance(payload := self._contents(index), bytes):
                received += len(payload)
                if received > size:
                    raise NodeError("the node sent more of a file than it announced", node=self.link.node)
                digest.update(payload)
                view = memoryview(payload)
                while view:
                    view = view[file.write(view) :]
                self.result.bytes += len(payload)
                self.progress(self.result.bytes, total)
        if payload.problem:
            self.result.problems.append(f"{path}: {payload.problem}")
        elif received < size:
            self.result.problems.append(f"{path}: it became shorter meanwhile; fetch again")
        elif digest.hexdigest() != payload.digest:
            with self._parent(path) as (folder, name):
                os.unlink(_partial(name), dir_fd=folder)
            raise TransferError(f"{path} did not arrive as it was sent", node=self.link.node, hint="fetch again")
        else:
            with self._parent(path) as (folder, name):
                os.replace(_partial(name), name, src_dir_fd=folder, dst_dir_fd=folder)
            self.result.files += 1

    def _contents(self, index: int) -> bytes | FileSent:
        """Return the next piece of a file; at its end, what the node thinks of it."""
        frame = self.link.receive()
        if frame is None:
            raise self.link.closed_error()
        kind, rank, payload = frame
        if kind == frames.BYTES and rank == index:
            return payload
        message = self.link.parse(payload, FileSent) if kind == frames.JSON else None
        if message is None or message.index != index:
            raise NodeError("the node sent a file out of turn", node=self.link.node)
        return message


def _link_at(folder: int, name: str) -> str | None:
    """Return where the link of this name leads; None when there is none."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None


def _partial(name: str) -> str:
    """Return the name of a file while it is on its way; not longer than names may be."""
    return PARTIAL + hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
