"""A node's end of `dtctl fetch`: which files a run has put out, their digests, and their contents.

Sent when it is needed, never with a launch. It only reads. What is said in both directions stands in messages.py.
An index counts the rows. Stdlib only, Python 3.8.
"""

from __future__ import annotations

import hashlib
import os

from dtctl import folders
from dtctl.supervisor import frames, requests, work
from dtctl.supervisor.messages import (
    FETCH_REQUESTS,
    ROWS,
    DigestFiles,
    DigestsEnd,
    FileDigest,
    FileSent,
    ListOutputs,
    Message,
    OutputLinks,
    OutputRows,
    OutputsListed,
    SendFiles,
)

IDLE_LIMIT_S = 600.0
PIECE_BYTES = 1 << 18


def main() -> int:
    """Serve one link; the exit status of the remote command."""
    return requests.serve(FETCH_REQUESTS, _Outputs().answer, IDLE_LIMIT_S)


class _Outputs:
    """The files of one run, as they were when they were listed."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        """Paths in the working folder."""
        self.top = ""

    def answer(self, link: frames.FdLink, request: Message) -> None:
        if isinstance(request, ListOutputs):
            self.list_files(link, request)
        elif isinstance(request, DigestFiles):
            for index, length in request.files:
                link.send_json(FileDigest(index=index, digest=self.digest(index, length)))
            link.send_json(DigestsEnd())
        elif isinstance(request, SendFiles):
            for index, offset in request.files:
                self.send(link, index, offset)

    def list_files(self, link: frames.FdLink, request: ListOutputs) -> None:
        """Send the rows of all files."""
        run_dir = os.path.expanduser(request.run_dir)
        self.top = work.folder_of(run_dir)
        unnameable = 0
        files: list[tuple[str, int]] = []
        for path, size, _ in work.written(run_dir, request.paths):
            if not _is_nameable(path):
                unnameable += 1
                continue
            self.rows.append(path)
            files.append((path, size))
            if len(files) == ROWS:
                link.send_json(OutputRows(rows=files))
                files = []
        link.send_json(OutputRows(rows=files))
        links: list[tuple[str, str]] = []
        for path, target in work.links(run_dir, request.paths):
            if not _is_nameable(path):
                unnameable += 1
                continue
            links.append((path, target))
            if len(links) == ROWS:
                link.send_json(OutputLinks(rows=links))
                links = []
        link.send_json(OutputLinks(rows=links))
        link.send_json(OutputsListed(is_there=bool(self.top), unnameable=unnameable))

    def digest(self, index: int, length: int) -> str:
        """SHA-256 of the beginning of a file; empty when it is shorter, or gone."""
        total = hashlib.sha256()
        try:
            with open(folders.open_regular(os.path.join(self.top, self.rows[index])), "rb") as file:
                while length:
                    data = file.read(min(length, PIECE_BYTES))
                    if not data:
                        return ""
                    total.update(data)
                    length -= len(data)
        except OSError:
            return ""
        return total.hexdigest()

    def send(self, link: frames.FdLink, index: int, offset: int) -> None:
        """Send a file from `offset` on, and the digest of all of it."""
        total, reason = hashlib.sha256(), ""
        try:
            with open(folders.open_regular(os.path.join(self.top, self.rows[index])), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                while file.tell() < size:
                    data = file.read(min(offset - file.tell() if file.tell() < offset else PIECE_BYTES, PIECE_BYTES))
                    if not data:
                        break  # it has become shorter
                    total.update(data)
                    if file.tell() > offset:
                        link.send_frame(frames.BYTES, data, index)
        except OSError as exc:
            reason = exc.strerror or "it cannot be read"
        link.send_json(FileSent(index=index, digest=total.hexdigest(), problem=reason))


def _is_nameable(path: str) -> bool:
    return all(folders.is_name(part) for part in path.split("/"))
