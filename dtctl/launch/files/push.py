"""The control machine's end of a push: names the tree, sends what the node lacks; see dtctl/supervisor/receive.py.

What several nodes lack is usually the same (everything, or the one file that was edited), so it is read and compressed
once and the pieces are shared, while they are still being made.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dtctl.errors import ConnectError, NodeError, TransferError
from dtctl.launch.control.link import NodeLink, parse_message, quoted
from dtctl.launch.files.relay import Relay
from dtctl.launch.files.tree import Tree
from dtctl.launch.records.events import PushReport
from dtctl.supervisor import relay as blocks
from dtctl.supervisor.messages.base import Refusal, by_op
from dtctl.supervisor.messages.setup import PushEnd, PushManifestEnd, PushRelay, PushSource, PushState, PushTree

PIECE_BYTES = 1 << 18
SAMPLES, SAMPLE_BYTES = 32, 1 << 15
SHARED_LIMIT_BYTES = 512 << 20
"""Limit of shared payloads, in bytes: larger ones are made again for each node rather than kept in memory."""

HINTS = {
    "disk-full": "free some space there, or set `cluster.workdir` to another disk",
    "permission": "the login user has to own `cluster.workdir`",
    "digest": "launch again; if it happens again, the node's disk or memory is at fault, or a file changed meanwhile",
}


_Segment: TypeAlias = tuple[int, int, int]
"""Index of a file, offset and length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """Result of a push."""

    path: str
    """Folder of the code on the node."""
    state: str
    """have: it was there already. done: it was brought."""
    files_sent: int
    bytes_sent: int
    """Bytes on the wire, compressed."""


class Payloads:
    """Compressed contents, made once for all nodes that lack the same files at the same time."""

    def __init__(self, relay: Relay | None = None) -> None:
        """`relay`: assignment of fetching nodes to serving ones; None if all is sent from here."""
        self.relay = relay
        self._lock = threading.Lock()
        self._payloads: dict[tuple[_Segment, ...], _Payload] = {}
        self._manifest: bytes | None = None
        self._digesting = threading.Lock()
        self._digests: dict[tuple[int, ...], list[bytes]] = {}

    def manifest(self, tree: Tree) -> bytes:
        """Return the list of files, compressed."""
        with self._lock:
            if self._manifest is None:
                rows = [
                    (e.path.decode("latin-1"), e.mode, e.size, e.digest, e.link.decode("latin-1")) for e in tree.files
                ]
                self._manifest = zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)
            return self._manifest

    def digests(self, tree: Tree, indexes: tuple[int, ...]) -> list[bytes]:
        """SHA-256 of the blocks of the files with these indexes.

        Raises:
            _Unreadable: a file has changed since it was scanned.
        """
        with self._digesting:  # threads that need the same digests wait for it
            if indexes not in self._digests:
                self._digests[indexes] = [_digest(tree, block) for block in _cut(tree, indexes)]
            return self._digests[indexes]

    def pieces(self, tree: Tree, segments: Sequence[_Segment]) -> Iterator[bytes]:
        """Parts of files as one zlib stream, in pieces.

        Raises:
            _Unreadable: a file has changed since it was scanned.
        """
        key = tuple(segments)
        if sum(length for _, _, length in key) > SHARED_LIMIT_BYTES:
            yield from _compressed(tree, key)
            return
        with self._lock:
            payload = self._payloads.get(key)
            if payload is None:
                payload = self._payloads[key] = _Payload(_compressed(tree, key))
            payload.readers += 1
        try:
            yield from payload.pieces()
        finally:
            with self._lock:
                payload.readers -= 1
                if not payload.readers:  # a run may last for days after its push
                    self._payloads.pop(key, None)


class _Payload:
    """Pieces that one thread makes and any number of others read."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self.readers = 0
        self._chunks: list[bytes] = []
        self._error: BaseException | None = None
        self._finished = False
        self._news = threading.Condition()
        threading.Thread(target=self._make, args=(source,), name="compress", daemon=True).start()

    def _make(self, source: Iterator[bytes]) -> None:
        error: BaseException | None = None
        try:
            for chunk in source:
                with self._news:
                    self._chunks.append(chunk)
                    self._news.notify_all()
        except BaseException as exc:  # noqa: BLE001 - raised in the threads that read
            error = exc
        with self._news:
            self._error, self._finished = error, True
            self._news.notify_all()

    def pieces(self) -> Iterator[bytes]:
        """Yield all pieces from the first on."""
        index = 0
        while True:
            with self._news:
                while index >= len(self._chunks) and not self._finished:
                    self._news.wait()
                if index >= len(self._chunks):
                    if self._error is not None:
                        raise self._error
                    return
                chunk = self._chunks[index]
            yield chunk
            index += 1


class _Unreadable(Exception):
    """A file is not what it was when the tree was scanned."""

    def __init__(self, path: bytes, reason: str) -> None:
        super().__init__(reason)
        self.path = os.fsdecode(path)


def _whole(tree: Tree, indexes: Sequence[int]) -> list[_Segment]:
    return [(index, 0, tree.files[index].size) for index in indexes]


def _cut(tree: Tree, indexes: Sequence[int]) -> list[list[_Segment]]:
    """Return the blocks of files, as the node cuts them, too."""
    cut = blocks.cut(tree.files[index].size for index in indexes)
    return [[(indexes[number], offset, length) for number, offset, length in block] for block in cut]


def _digest(tree: Tree, block: Sequence[_Segment]) -> bytes:
    total = hashlib.sha256()
    for segment in block:
        for data in _contents(tree, segment):
            total.update(data)
    return total.digest()


def _compressed(tree: Tree, segments: Sequence[_Segment]) -> Iterator[bytes]:
    """Yield one zlib stream of parts of files; stored, not compressed, if a sample does not shrink."""
    if not segments:
        return
    deflate = zlib.compressobj(_level(tree, segments))
    ready = bytearray()
    for segment in segments:
        for data in _contents(tree, segment):
            ready += deflate.compress(data)
            if len(ready) >= PIECE_BYTES:
                yield bytes(ready)
                ready.clear()
    ready += deflate.flush()
    yield bytes(ready)


def _level(tree: Tree, segments: Sequence[_Segment]) -> int:
    """Compression level: 1, or 0 when what is to be sent is compressed already, by a sample spread over it.

    Level 1 makes of 50 MB of sources 18 MB in 0.45 s, which is less than what it saves in encryption for two nodes;
    level 6 takes 1.25 s for 16 MB.
    """
    sample = bytearray()
    for segment in segments[:: max(1, len(segments) // SAMPLES)]:
        sample += next(_contents(tree, segment), b"")[:SAMPLE_BYTES]
    return 1 if len(zlib.compress(bytes(sample), 1)) < 0.9 * len(sample) else 0


def _contents(tree: Tree, segment: _Segment) -> Iterator[bytes]:
    """Yield what is in a part of a file, in pieces; the file is exactly as long as the scan found it."""
    index, offset, remaining = segment
    entry = tree.files[index]
    path = os.path.join(os.fsencode(tree.root), entry.path)
    is_last = offset + remaining == entry.size
    try:
        with open(path, "rb", buffering=0) as file:
            if offset:
                file.seek(offset)
            while remaining > PIECE_BYTES:
                data = file.read(PIECE_BYTES)
                if not data:
                    break
                remaining -= len(data)
                yield data
            data = file.read(remaining + is_last)
    except OSError as exc:
        raise _Unreadable(path, f"a file can no longer be read: {exc.strerror}") from exc
    if len(data) != remaining:
        raise _Unreadable(path, "a file changed while it was being pushed")
    yield data


def report_after(before_bytes: int, progress: PushReport) -> PushReport:
    """Return the report of a push that follows one of so many bytes."""
    return lambda sent, note="": progress(before_bytes + sent, note)


def push(
    link: NodeLink,
    tree: Tree,
    *,
    shared: Payloads,
    store: str = "code",
    progress: PushReport | None = None,
) -> PushResult:
    """Bring a tree to one node.

    Args:
        link: to the node's half of dtctl, which waits for a message.
        tree: what to bring.
        store: `code` or `data`, the folder there.
        shared: the same for all nodes of a launch.
        progress: called with the number of bytes sent so far, and with notes.

    Raises:
        NodeError: the node cannot take it.
        TransferError: what arrived is not what was sent, or a file changed meanwhile.
        ConnectError: the link is gone.
    """
    link.send(PushTree(tree=tree.digest, store=store))
    answer = _answer(link, "have", "want-manifest")
    if answer.state == "have":
        return PushResult(path=_folder(answer, tree, store, link.node), state="have", files_sent=0, bytes_sent=0)
    manifest = shared.manifest(tree)
    indexes: tuple[int, ...] = ()
    bytes_sent = len(manifest)
    try:
        link.send_bytes(manifest)
        link.send(PushManifestEnd())
        indexes = _needed(_answer(link, "need"), tree, link.node)
        relay = shared.relay
        if relay is not None and relay.is_worthwhile(sum(tree.files[index].size for index in indexes)):
            done, relayed_bytes = _push_blocks(link, tree, indexes, shared, relay, progress or _ignore)
            bytes_sent += relayed_bytes
        else:
            for chunk in shared.pieces(tree, _whole(tree, indexes)):
                link.send_bytes(chunk)
                bytes_sent += len(chunk)
                if progress is not None:
                    progress(bytes_sent)
            link.send(PushEnd())
            done = _answer(link, "done")
    except _Unreadable as exc:
        raise TransferError(str(exc), node=link.node, where=exc.path, hint="launch again") from exc
    except ConnectError:
        _answer(link)  # a node that refuses sends its reason, and then no longer reads
        raise
    if done.digest != tree.digest:
        raise TransferError("the node has a different tree from the one that was sent", node=link.node)
    return PushResult(
        path=_folder(done, tree, store, link.node), state="done", files_sent=len(indexes), bytes_sent=bytes_sent
    )


def _ignore(sent_bytes: int, note: str = "", /) -> None:
    """Ignore progress."""


def _push_blocks(
    link: NodeLink, tree: Tree, indexes: tuple[int, ...], shared: Payloads, relay: Relay, progress: PushReport
) -> tuple[PushState, int]:
    """Let a node fetch its blocks from others, or from here; its last answer, and the bytes that left this machine."""
    digests = shared.digests(tree, indexes)
    certificate, key = relay.key_pair()
    link.send(PushRelay(certificate=certificate, key=key))
    link.send_bytes(b"".join(digests))
    link.send(PushManifestEnd())
    answer = _answer(link, "blocks")
    cut = _cut(tree, indexes)
    if not all(number < len(cut) for number in answer.blocks):
        raise TransferError("the node requested blocks that are not in the tree", node=link.node)
    missing = [cut[number] for number in answer.blocks]
    got = [0]
    for block in missing:
        got.append(got[-1] + sum(length for _, _, length in block))
    count, bytes_sent = 0, 32 * len(digests)

    def note(text: str) -> None:
        progress(got[count], text)

    member = relay.join(link.node, answer, note)
    is_dead = True
    try:
        while True:
            source = relay.choose_source(member)
            if source is None:
                segments = [segment for block in missing[count:] for segment in block]
                bytes_sent += _send_rest(link, tree, segments, shared, got[count], progress)
                answer = _answer(link, "done")
            else:
                link.send(PushSource(address=source.address, port=source.port))
                while (answer := _answer(link, "got", "source-failed", "done")).state == "got":
                    count = _counted(answer, count, len(missing), link.node)
                    relay.reached()
                    progress(got[count])
            if answer.state == "done":
                is_dead = False
                return answer, bytes_sent
            relay.fail(member, answer, note)
    finally:
        relay.leave(member, is_dead=is_dead)


def _counted(answer: PushState, before: int, limit: int, node: str) -> int:
    if not before < answer.count <= limit:
        raise TransferError(f"the node counts {answer.count} blocks of {limit}", node=node)
    return answer.count


def _send_rest(
    link: NodeLink, tree: Tree, segments: list[_Segment], shared: Payloads, before: int, progress: PushReport
) -> int:
    """Send a node all that it has not got from others; the number of bytes."""
    link.send(PushSource())
    sent = 0
    for chunk in shared.pieces(tree, segments):
        link.send_bytes(chunk)
        sent += len(chunk)
        progress(before + sent)
    link.send(PushEnd())
    return sent


def _needed(answer: PushState, tree: Tree, node: str) -> tuple[int, ...]:
    indexes = answer.indexes
    if len(set(indexes)) < len(indexes) or not all(index < len(tree.files) for index in indexes):
        raise TransferError("the node requested files that are not in the tree, or one file twice", node=node)
    return tuple(indexes)


def _folder(answer: PushState, tree: Tree, store: str, node: str) -> str:
    """Return the folder of the tree from the node's answer; its name must be that of the tree."""
    path = answer.path
    folder, name = posixpath.split(path)
    if not path.startswith("/") or posixpath.basename(folder) != store or name.partition(".")[0] != tree.digest:
        raise TransferError(f"the node says that the code lies in {quoted(path)}", node=node)
    return path


def _answer(link: NodeLink, *states: str) -> PushState:
    """Return the node's next message.

    Raises:
        NodeError: it cannot take the push.
        TransferError: what arrived is not what was sent; or the message is none of `states`.
        ConnectError: there is none, because the link is gone.
    """
    document = link.receive_json()
    if document is None:
        raise ConnectError("the link was lost during the push", node=link.node)
    message = parse_message(document, by_op(PushState, Refusal), node=link.node)
    state = message.state if isinstance(message, PushState) else message.op
    if isinstance(message, PushState) and state in states:
        return message
    if not isinstance(message, PushState | Refusal) or state != "error":
        raise TransferError(f"the node answered {state!r}, which is not valid here", node=link.node)
    code, text = message.code, message.message
    if code in ("digest", "escape", "protocol"):
        raise TransferError(f"the push failed: {text}", node=link.node, hint=HINTS.get(code))
    problem = "the disk is full" if code == "disk-full" else "the code cannot be written"
    raise NodeError(f"{problem}: {text}", node=link.node, hint=HINTS.get(code))
