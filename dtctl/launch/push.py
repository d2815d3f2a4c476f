"""The control machine's end of a push: says which tree, sends what the node lacks; see dtctl/supervisor/receive.py.

What several nodes lack is usually the same (everything, or the one file that was edited), so it is read and compressed
once and the pieces are shared, while they are still being made.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dtctl.errors import ConnectError, DtctlError, NodeError, TransferError
from dtctl.launch.link import Link
from dtctl.launch.tree import Tree

PIECE_BYTES = 1 << 18
SAMPLE_BYTES = 1 << 20
SHARED_LIMIT_BYTES = 512 << 20
"""Larger payloads are made for each node anew rather than kept in memory."""

HINTS = {
    "disk-full": "free some space there, or set `cluster.workdir` to another disk",
    "permission": "the login user has to own `cluster.workdir`",
    "digest": "launch again; if it happens again, the node's disk or memory is at fault, or a file changed meanwhile",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """What a push did."""

    path: str
    """Folder of the code on the node."""
    state: str
    """have: it was there already. done: it was brought."""
    files_sent: int
    bytes_sent: int
    """Bytes on the wire, compressed."""


class Payloads:
    """Compressed contents, made once for all nodes that lack the same files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[tuple[int, int], ...], _Payload] = {}
        self._manifest: bytes | None = None

    def manifest(self, tree: Tree) -> bytes:
        """The list of files, compressed."""
        with self._lock:
            if self._manifest is None:
                rows = [
                    [e.path.decode("latin-1"), e.mode, e.size, e.digest, e.link.decode("latin-1")] for e in tree.files
                ]
                self._manifest = zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)
            return self._manifest

    def pieces(self, tree: Tree, ranges: tuple[tuple[int, int], ...]) -> Iterator[bytes]:
        """The contents of the files with these indexes as one zlib stream, in pieces.

        Raises:
            TransferError: a file has changed since it was scanned.
        """
        indexes = [index for first, end in ranges for index in range(first, end)]
        if sum(tree.files[index].size for index in indexes) > SHARED_LIMIT_BYTES:
            return _compressed(tree, indexes)
        with self._lock:
            if ranges not in self._made:
                self._made[ranges] = _Payload(_compressed(tree, indexes))
            payload = self._made[ranges]
        return payload.pieces()


class _Payload:
    """Pieces that one thread makes and any number of others read."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._made: list[bytes] = []
        self._error: BaseException | None = None
        self._finished = False
        self._news = threading.Condition()
        threading.Thread(target=self._make, args=(source,), name="compress", daemon=True).start()

    def _make(self, source: Iterator[bytes]) -> None:
        error: BaseException | None = None
        try:
            for piece in source:
                with self._news:
                    self._made.append(piece)
                    self._news.notify_all()
        except BaseException as exc:  # noqa: BLE001 - raised in the threads that read
            error = exc
        with self._news:
            self._error, self._finished = error, True
            self._news.notify_all()

    def pieces(self) -> Iterator[bytes]:
        """All pieces from the first on."""
        index = 0
        while True:
            with self._news:
                while index >= len(self._made) and not self._finished:
                    self._news.wait()
                if index >= len(self._made):
                    if self._error is not None:
                        raise self._error
                    return
                piece = self._made[index]
            yield piece
            index += 1


def _compressed(tree: Tree, indexes: list[int]) -> Iterator[bytes]:
    """One zlib stream of the files' contents; stored, not compressed, if a sample does not shrink."""
    root = os.fsencode(tree.root)
    deflate = None
    ready = bytearray()
    for index in indexes:
        entry = tree.files[index]
        data = _read(os.path.join(root, entry.path), entry.size)
        if deflate is None:
            deflate = zlib.compressobj(_level(tree, indexes))
        for start in range(0, len(data), PIECE_BYTES):
            ready += deflate.compress(data[start : start + PIECE_BYTES])
            if len(ready) >= PIECE_BYTES:
                yield bytes(ready)
                ready.clear()
    if deflate is not None:
        ready += deflate.flush()
    if ready:
        yield bytes(ready)


def _level(tree: Tree, indexes: list[int]) -> int:
    """Compression level: 1, or 0 when what is to be sent is compressed already, by a sample spread over it."""
    root = os.fsencode(tree.root)
    sample = bytearray()
    for index in indexes[:: max(1, len(indexes) // 32)]:
        entry = tree.files[index]
        sample += _read(os.path.join(root, entry.path), entry.size)[: SAMPLE_BYTES // 32]
    return 1 if len(zlib.compress(bytes(sample), 1)) < 0.9 * len(sample) else 0


def _read(path: bytes, size: int) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read()
    except OSError as exc:
        raise TransferError(
            f"a file cannot be read any more: {exc.strerror}", node="", where=os.fsdecode(path)
        ) from exc
    if len(data) != size:
        raise TransferError(
            "a file has changed while it was pushed", node="", where=os.fsdecode(path), hint="launch again"
        )
    return data


def push(link: Link, tree: Tree, *, shared: Payloads, progress: Callable[[int], None] | None = None) -> PushResult:
    """Bring a tree to one node.

    Args:
        link: to the node's half of dtctl, which waits for a message.
        tree: what to bring.
        shared: the same for all nodes of a launch.
        progress: called with the number of bytes sent so far.

    Raises:
        NodeError: the node cannot take it.
        TransferError: what arrived is not what was sent, or a file changed meanwhile.
        ConnectError: the link is gone.
    """
    link.send_json({"op": "push", "tree": tree.digest})
    answer = _answer(link)
    if answer["state"] == "have":
        return PushResult(path=answer["path"], state="have", files_sent=0, bytes_sent=0)
    manifest = shared.manifest(tree)
    link.send_bytes(manifest)
    link.send_json({"op": "push-manifest-end"})
    ranges = tuple((int(first), int(end)) for first, end in _answer(link)["ranges"])
    sent = len(manifest)
    for piece in shared.pieces(tree, ranges):
        link.send_bytes(piece)
        sent += len(piece)
        if progress is not None:
            progress(sent)
    link.send_json({"op": "push-end"})
    done = _answer(link)
    if done["digest"] != tree.digest:
        raise TransferError("the node has another tree than was sent", node=link.node)
    files = sum(end - first for first, end in ranges)
    return PushResult(path=done["path"], state="done", files_sent=files, bytes_sent=sent)


def _answer(link: Link) -> dict[str, Any]:
    message = link.receive_json()
    if message is None:
        raise ConnectError("the link was lost during the push", node=link.node)
    if message.get("state") != "error":
        return message
    code, text = message.get("code", ""), message.get("message", "unknown error")
    hint = HINTS.get(code)
    error: DtctlError
    if code in ("digest", "escape", "protocol"):
        error = TransferError(f"the push failed: {text}", node=link.node, hint=hint)
    else:
        what = f"the disk is full: {text}" if code == "disk-full" else f"the code cannot be written: {text}"
        error = NodeError(what, node=link.node, hint=hint)
    raise error
