"""Transfer of a run's outputs from its nodes: all files that are missing here, each checked by its SHA-256.

A node is not trusted: it decides only about the contents of the files in its own folder here. Names must be names of
files, no link is followed, no link out of the folder is made, and no more bytes are accepted than the node announced
and this machine has room for.
A file arrives under a temporary name (`.fetch-...`), which stays if the transfer is interrupted: the next fetch then
requests only the rest.
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
from dtctl.launch.control.link import NodeLink, open_node, quote_node_value, require_requested_value
from dtctl.printable import format_count
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
"""Most files that one request names, since it has to fit into a frame."""
END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSource:
    """A node of a run from which files are fetched."""

    target: Target
    python: str | None
    run_dir: str
    """Folder of the run on the node; may begin with `~`."""


@dataclass(slots=True, kw_only=True)
class FetchResult:
    """Files that came from one node."""

    files: int = 0
    """Number of files that were fetched now."""
    bytes: int = 0
    """Bytes that the node sent for these files."""
    unchanged: int = 0
    """Number of files that were here already."""
    problems: list[str] = field(default_factory=list)
    """Phrase for each file that could not be fetched."""
    left_out: list[str] = field(default_factory=list)
    """Phrase for each link that was not made because it leads out of the working folder."""
    is_there: bool = True
    """True if the node has a working folder of the run."""


def fetch_run_outputs(
    sources: Sequence[FetchSource],
    transport: Transport,
    *,
    paths: Sequence[str],
    into: Path,
    progress: Callable[[str, int, int], None] = lambda _node, _done, _total: None,
) -> dict[str, FetchResult | DtctlError]:
    """Fetch outputs from all nodes at once; return for each node the result or the error.

    Args:
        sources: the run's nodes.
        transport: transport to these nodes.
        paths: paths to fetch, relative to the working folder, or absolute; empty: all files that the programs wrote.
        into: folder on this machine; the outputs of each node are written to a folder below it with the node's name.
        progress: called with a node, the bytes that have arrived, and the total.
    """

    def fetch_one(source: FetchSource) -> FetchResult:
        name, first = source.target.name, ListOutputs(run_dir=source.run_dir, paths=list(paths))
        with (
            open_node(transport, source.target, first, python=source.python, silence_s=SILENCE_S) as link,
            _private_folder(into, name) as folder,
        ):
            return _NodeFetch(link, folder, lambda done, total: progress(name, done, total)).run()

    return fan_out({source.target.name: source for source in sources}, fetch_one)


def count_run_outputs(
    sources: Sequence[FetchSource], transport: Transport, *, paths: Sequence[str]
) -> dict[str, int | DtctlError]:
    """Return the number of files that a run's programs have written on each node, or the error; see above."""

    def count_one(source: FetchSource) -> int:
        first, count = ListOutputs(run_dir=source.run_dir, paths=list(paths)), 0
        with open_node(transport, source.target, first, python=source.python, silence_s=SILENCE_S) as link:
            while not isinstance(answer := link.expect(OutputRows, OutputLinks, OutputsListed), OutputsListed):
                count += len(answer.rows) if isinstance(answer, OutputRows) else 0
            link.send(Quit())
            link.stream.exit_status(END_S)
        return count

    return fan_out({source.target.name: source for source in sources}, count_one)


@contextlib.contextmanager
def _private_folder(into: Path, node: str) -> Iterator[int]:
    """Open the folder for a node's files on this machine, as long as the context lasts.

    Raises:
        LaunchError: the folder cannot be made, or is a link.
    """
    try:
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        top = folders.open_folder(str(into))
        try:
            folder = _make_subfolder(top, node)
        finally:
            os.close(top)
    except OSError as exc:
        raise LaunchError(f"the outputs cannot be stored: {exc.strerror}", where=str(into / node)) from exc
    try:
        yield folder
    finally:
        os.close(folder)


def _make_subfolder(parent: int, name: str) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    return folders.open_folder(name, parent)


class _PartialFile(NamedTuple):
    """Part of a file that is already here."""

    length: int
    is_whole: bool
    """True if the file has its final name; False if a transfer was interrupted."""


class _NodeFetch:
    """Fetch from one node."""

    def __init__(self, link: NodeLink, folder: int, progress: Callable[[int, int], None]) -> None:
        self.link = link
        self.folder = folder
        self.progress = progress
        self.rows: list[tuple[str, int]] = []
        self.links: dict[str, str] = {}
        self.result = FetchResult()

    def run(self) -> FetchResult:
        """Fetch the list of files, and then the missing files and links."""
        self._read_rows()
        begun_files = {
            index: begun
            for index, (path, size) in enumerate(self.rows)
            if (begun := self._find_fetched_part(path, size))
        }
        digests = self._request_file_digests([(index, begun.length) for index, begun in begun_files.items()])
        missing = []
        for index, (path, _) in enumerate(self.rows):
            begun = begun_files.get(index)
            is_good = begun is not None and digests.get(index) == self._compute_part_digest(path, begun)
            if begun is not None and is_good and begun.is_whole:
                self.result.unchanged += 1
            else:
                missing.append((index, begun.length if begun is not None and is_good else 0))
        self._require_room(sum(self.rows[index][1] - offset for index, offset in missing))
        self._receive_missing_files(missing)
        self._make_links()
        self.link.send(Quit())
        self.link.stream.exit_status(END_S)
        return self.result

    # -- the list of the node -----------------------------------------------------------------------------------------

    def _read_rows(self) -> None:
        paths: set[str] = set()
        while True:
            answer = self.link.expect(OutputRows, OutputLinks, OutputsListed)
            if isinstance(answer, OutputsListed):
                self.result.is_there = answer.is_there
                if answer.unnameable:
                    self.result.problems.append(
                        f"{format_count(answer.unnameable, 'file')} with control characters in their names, or no UTF-8"
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
            raise NodeError(
                f"the node listed {quote_node_value(path)}, which is not the path of a file", node=self.link.node
            )

    def _request_file_digests(self, files: list[tuple[int, int]]) -> dict[int, str]:
        """Return the node's digests of its files, each over as many bytes as are here."""
        lengths, digests = dict(files), {}
        for begin in range(0, len(files), BATCH):
            self.link.send(DigestFiles(files=files[begin : begin + BATCH]))
            while isinstance(answer := self.link.expect(FileDigest, DigestsEnd), FileDigest):
                require_requested_value(answer.index, lengths, subject="the digest of file", node=self.link.node)
                digests[answer.index] = answer.digest
        return digests

    # -- the files on this machine ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open_parent_folder(self, path: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of a file without following links; yield its descriptor and the file's name."""
        *above, name = path.split("/")
        folder = os.dup(self.folder)
        try:
            for part in above:
                inner = _make_subfolder(folder, part) if create else folders.open_folder(part, folder)
                os.close(folder)
                folder = inner
            yield folder, name
        finally:
            os.close(folder)

    def _find_fetched_part(self, path: str, size: int) -> _PartialFile | None:
        """Return the part of a file of this size that is here; None if it cannot be used."""
        for is_whole in (True, False):
            with contextlib.suppress(OSError), self._open_parent_folder(path) as (folder, name):
                info = os.stat(name if is_whole else _build_partial_name(name), dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) and (info.st_size == size if is_whole else 0 < info.st_size <= size):
                    return _PartialFile(info.st_size, is_whole)
        return None

    def _compute_part_digest(self, path: str, begun: _PartialFile) -> str:
        total = hashlib.sha256()
        with self._open_parent_folder(path) as (folder, name):
            fd = os.open(
                name if begun.is_whole else _build_partial_name(name), os.O_RDONLY | folders.NO_LINK, dir_fd=folder
            )
            with os.fdopen(fd, "rb") as file:
                while data := file.read(READ_BYTES):
                    total.update(data)
        return total.hexdigest()

    def _require_room(self, need: int) -> None:
        free = os.fstatvfs(self.folder)
        available = free.f_bavail * free.f_frsize - MARGIN_BYTES
        if need and need > available:
            raise LaunchError(
                f"{need / 2**20:.1f} MiB are to come from {self.link.node}, and {max(0, available) / 2**20:.1f} MiB "
                "are free here",
                hint="name a smaller part as PATH, or another disk as `--out DIR`",
            )

    # -- the transfer -------------------------------------------------------------------------------------------------

    def _receive_missing_files(self, missing: list[tuple[int, int]]) -> None:
        total = sum(self.rows[index][1] - offset for index, offset in missing)
        for position, (index, offset) in enumerate(missing):
            if position % BATCH == 0:
                self.link.send(SendFiles(files=missing[position : position + BATCH]))
            try:
                self._receive_one(index, offset, total)
            except OSError as exc:
                raise LaunchError(
                    f"{self.rows[index][0]} of {self.link.node} cannot be stored: {exc.strerror}",
                    hint="the received files are kept; fetch again to continue",
                ) from exc

    def _make_links(self) -> None:
        """Make the symbolic links, each to a place in the node's own folder."""
        encoded = {os.fsencode(path): os.fsencode(target) for path, target in self.links.items()}
        for path, target in self.links.items():
            if leads_out(os.fsencode(path), os.fsencode(target), encoded):
                self.result.left_out.append(
                    f"{path}: the link leads out of the working folder, to {quote_node_value(target)}"
                )
                continue
            try:
                with self._open_parent_folder(path, create=True) as (folder, name):
                    if _link_at(folder, name) == target:
                        self.result.unchanged += 1
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(_build_partial_name(name), dir_fd=folder)
                    os.symlink(target, _build_partial_name(name), dir_fd=folder)
                    os.replace(_build_partial_name(name), name, src_dir_fd=folder, dst_dir_fd=folder)
                    self.result.files += 1
            except OSError as exc:
                self.result.problems.append(f"{path}: {exc.strerror}")

    def _receive_one(self, index: int, offset: int, total: int) -> None:
        path, size = self.rows[index]
        digest = hashlib.sha256()
        with self._open_parent_folder(path, create=True) as (folder, name):
            fd = os.open(_build_partial_name(name), os.O_RDWR | os.O_CREAT | folders.NO_LINK, 0o600, dir_fd=folder)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            file.truncate(offset)
            while file.tell() < offset and (data := file.read(min(offset - file.tell(), READ_BYTES))):
                digest.update(data)
            received = offset
            while isinstance(payload := self._receive_file_piece(index), bytes):
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
            with self._open_parent_folder(path) as (folder, name):
                os.unlink(_build_partial_name(name), dir_fd=folder)
            raise TransferError(f"{path} did not arrive unchanged", node=self.link.node, hint="fetch again")
        else:
            with self._open_parent_folder(path) as (folder, name):
                os.replace(_build_partial_name(name), name, src_dir_fd=folder, dst_dir_fd=folder)
            self.result.files += 1

    def _receive_file_piece(self, index: int) -> bytes | FileSent:
        """Return the next piece of a file; at its end, the node's message about the file."""
        frame = self.link.receive()
        if frame is None:
            raise self.link.closed_error()
        kind, rank, payload = frame
        if kind == frames.BYTES and rank == index:
            return payload
        message = self.link.parse(payload, FileSent) if kind == frames.JSON else None
        if message is None or message.index != index:
            raise NodeError("the node sent a file in the wrong order", node=self.link.node)
        return message


def _link_at(folder: int, name: str) -> str | None:
    """Return the target of the link with this name; None if there is none."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None


def _build_partial_name(name: str) -> str:
    """Return the temporary name of a file during its transfer, which has a fixed length."""
    return PARTIAL + hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
