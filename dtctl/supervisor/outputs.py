"""A node's end of `dtctl fetch`: the files that a run has written, their digests, and their contents.

This module only reads. The messages in both directions are in messages/outputs.py; an index is the number of a row.
Stdlib only, Python 3.8.
"""

from __future__ import annotations

import hashlib
import os

from dtctl import folders
from dtctl.supervisor import frames, run_workdir
from dtctl.supervisor.messages.base import Message, index_message_types
from dtctl.supervisor.messages.outputs import (
    ROWS,
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
from dtctl.supervisor.requests import NodeRequests

PIECE_BYTES = 1 << 18


class OutputRequests(NodeRequests):
    """Answers to `dtctl fetch` about the files of one run, as they were when they were listed."""

    KINDS = index_message_types(ListOutputs, DigestFiles, SendFiles)
    IDLE_LIMIT_S = 600.0

    def __init__(self, link: frames.FdLink, workdir: str) -> None:
        """Prepare to answer, see `NodeRequests`."""
        super().__init__(link, workdir)
        self.places: list[str] = []
        """Path of each row on this node."""

    def answer(self, request: Message) -> None:
        """List the files, or send digests or contents of some files."""
        if isinstance(request, ListOutputs):
            self.list_files(request)
        elif isinstance(request, DigestFiles):
            for index, length in request.files:
                self.link.send_json(FileDigest(index=index, digest=self.digest(index, length)))
            self.link.send_json(DigestsEnd())
        elif isinstance(request, SendFiles):
            for index, offset in request.files:
                self.send(index, offset)

    def list_files(self, request: ListOutputs) -> None:
        """Send the rows of all files."""
        run_dir = os.path.expanduser(request.run_dir)
        top = run_workdir.find_working_folder(run_dir)
        unnameable = 0
        files: list[tuple[str, int]] = []
        for path, size, place in _list_output_files(run_dir, top, request.paths):
            if not _is_nameable(path):
                unnameable += 1
                continue
            self.places.append(place)
            files.append((path, size))
            if len(files) == ROWS:
                self.link.send_json(OutputRows(rows=files))
                files = []
        self.link.send_json(OutputRows(rows=files))
        links: list[tuple[str, str]] = []
        inside = [path for path in request.paths if not path.startswith("/")]
        for path, target in run_workdir.list_written_links(run_dir, inside) if inside or not request.paths else ():
            if not _is_nameable(path):
                unnameable += 1
                continue
            links.append((path, target))
            if len(links) == ROWS:
                self.link.send_json(OutputLinks(rows=links))
                links = []
        self.link.send_json(OutputLinks(rows=links))
        self.link.send_json(OutputsListed(is_there=bool(top), unnameable=unnameable))

    def digest(self, index: int, length: int) -> str:
        """Return the SHA-256 of the beginning of a file; empty if the file is shorter or gone."""
        total = hashlib.sha256()
        try:
            with open(folders.open_regular(self.places[index]), "rb") as file:
                while length:
                    data = file.read(min(length, PIECE_BYTES))
                    if not data:
                        return ""
                    total.update(data)
                    length -= len(data)
        except OSError:
            return ""
        return total.hexdigest()

    def send(self, index: int, offset: int) -> None:
        """Send a file from `offset` on, and the digest of the whole file."""
        total, reason = hashlib.sha256(), ""
        try:
            with open(folders.open_regular(self.places[index]), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                while file.tell() < size:
                    data = file.read(min(offset - file.tell() if file.tell() < offset else PIECE_BYTES, PIECE_BYTES))
                    if not data:
                        break  # The file has become shorter.
                    total.update(data)
                    if file.tell() > offset:
                        self.link.send_frame(frames.BYTES, data, index)
        except OSError as exc:
            reason = exc.strerror or "it cannot be read"
        self.link.send_json(FileSent(index=index, digest=total.hexdigest(), problem=reason))


def _list_output_files(run_dir: str, top: str, paths: list):  # type: ignore[no-untyped-def, type-arg]
    """Yield path, size and place of each file that the run has written or an absolute path names."""
    inside = [path for path in paths if not path.startswith("/")]
    for path, size, _ in run_workdir.list_written_files(run_dir, inside) if inside or not paths else ():
        yield path, size, os.path.join(top, path)
    outside = [path for path in paths if path.startswith("/")]
    for path, size, _ in run_workdir.list_written_files(run_dir, outside) if outside else ():
        yield path, size, "/" + path


def _is_nameable(path: str) -> bool:
    return all(folders.is_name(part) for part in path.split("/"))
