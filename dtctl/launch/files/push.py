"""The control machine's end of a push: it names the tree and sends missing files; see dtctl/supervisor/receive.py.

Several nodes usually lack the same files (all, or the one that was edited), so these are read and compressed once, and
the nodes share the pieces while they are still being made.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import posixpath
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dtctl.errors import ConnectError, NodeError, TransferError
from dtctl.launch.control.link import NodeLink, parse_message, quote_node_value
from dtctl.launch.files.relay import BlockRelay
from dtctl.launch.files.tree import FileTree
from dtctl.launch.records.events import PushReport
from dtctl.supervisor import relay as blocks
from dtctl.supervisor.messages.base import Refusal, index_message_types
from dtctl.supervisor.messages.setup import PushEnd, PushManifestEnd, PushRelay, PushSource, PushState, PushTree

PIECE_BYTES = 1 << 18
SAMPLES, SAMPLE_BYTES = 32, 1 << 15
SHARED_LIMIT_BYTES = 512 << 20
"""Most bytes of a shared payload: a larger one is made again for each node and not kept in memory."""

HINTS = {
    "disk-full": "free some space there, or set `cluster.workdir` to another disk",
    "permission": "the login user has to own `cluster.workdir`",
    "digest": "launch again; if it happens again, the node's disk or memory is at fault, or a file changed meanwhile",
}


_Segment: TypeAlias = tuple[int, int, int]
"""Part of a file: index of the file, offset and length."""
_Piece: TypeAlias = tuple[bytes, int]
"""Piece of a zlib stream, and the number of bytes of the contents that are compressed up to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """Result of a push."""

    path: str
    """Folder of the code on the node."""
    state: str
    """`have` if the code was there already, `done` if it was brought."""
    files_sent: int
    bytes_sent: int
    """Bytes on the wire, compressed."""
    content_bytes: int = 0
    """Bytes of the contents that the node lacked."""


class PayloadCache:
    """Compressed contents, made once for all nodes that lack the same files at the same time."""

    def __init__(self, relay: BlockRelay | None = None) -> None:
        """Create an empty cache; `relay` assigns fetching nodes to serving ones; None: this machine sends all."""
        self.relay = relay
        self._lock = threading.Lock()
        self._payloads: dict[tuple[_Segment, ...], _Payload] = {}
        self._manifest: bytes | None = None
        self._digesting = threading.Lock()
        self._digests: dict[tuple[int, ...], list[bytes]] = {}

    def manifest(self, tree: FileTree) -> bytes:
        """Return the list of files, compressed."""
        with self._lock:
            if self._manifest is None:
                rows = [
                    (e.path.decode("latin-1"), e.mode, e.size, e.digest, e.link.decode("latin-1")) for e in tree.files
                ]
                self._manifest = zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)
            return self._manifest

    def digests(self, tree: FileTree, indexes: tuple[int, ...]) -> list[bytes]:
        """Return the SHA-256 of each block of the files with these indexes.

        Raises:
            _FileChangedError: a file has changed since it was scanned.
        """
        with self._digesting:  # Other threads that need the same digests wait here.
            if indexes not in self._digests:
                self._digests[indexes] = [
                    _compute_block_digest(tree, block) for block in _build_segment_blocks(tree, indexes)
                ]
            return self._digests[indexes]

    def pieces(self, tree: FileTree, segments: Sequence[_Segment]) -> Iterator[_Piece]:
        """Yield the pieces of one zlib stream with parts of files.

        Raises:
            _FileChangedError: a file has changed since it was scanned.
        """
        key = tuple(segments)
        if sum(length for _, _, length in key) > SHARED_LIMIT_BYTES:
            yield from _compress_segments(tree, key)
            return
        with self._lock:
            payload = self._payloads.get(key)
            if payload is None:
                payload = self._payloads[key] = _Payload(_compress_segments(tree, key))
            payload.readers += 1
        try:
            yield from payload.pieces()
        finally:
            with self._lock:
                payload.readers -= 1
                if not payload.readers:  # A run may last for days after its push, so its payloads are freed.
                    self._payloads.pop(key, None)


class _Payload:
    """Pieces that one thread makes and any number of other threads read."""

    def __init__(self, source: Iterator[_Piece]) -> None:
        self.readers = 0
        self._chunks: list[_Piece] = []
        self._error: BaseException | None = None
        self._finished = False
        self._news = threading.Condition()
        threading.Thread(target=self._collect_chunks, args=(source,), name="compress", daemon=True).start()

    def _collect_chunks(self, source: Iterator[_Piece]) -> None:
        error: BaseException | None = None
        try:
            for chunk in source:
                with self._news:
                    self._chunks.append(chunk)
                    self._news.notify_all()
        except BaseException as exc:  # noqa: BLE001 - raised again in the threads that read
            error = exc
        with self._news:
            self._error, self._finished = error, True
            self._news.notify_all()

    def pieces(self) -> Iterator[_Piece]:
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


class _FileChangedError(Exception):
    """A file has changed since the tree was scanned."""

    def __init__(self, path: bytes, reason: str) -> None:
        super().__init__(reason)
        self.path = os.fsdecode(path)


def _build_whole_segments(tree: FileTree, indexes: Sequence[int]) -> list[_Segment]:
    return [(index, 0, tree.files[index].size) for index in indexes]


def _build_segment_blocks(tree: FileTree, indexes: Sequence[int]) -> list[list[_Segment]]:
    """Return the blocks of files, which are the same on the node."""
    cut = blocks.split_file_blocks(tree.files[index].size for index in indexes)
    return [[(indexes[number], offset, length) for number, offset, length in block] for block in cut]


def _compute_block_digest(tree: FileTree, block: Sequence[_Segment]) -> bytes:
    total = hashlib.sha256()
    for segment in block:
        for data in _read_segment_pieces(tree, segment):
            total.update(data)
    return total.digest()


def _compress_segments(tree: FileTree, segments: Sequence[_Segment]) -> Iterator[_Piece]:
    """Yield one zlib stream of parts of files, which is not compressed if a sample does not shrink."""
    if not segments:
        return
    deflate = zlib.compressobj(_choose_compression_level(tree, segments))
    ready, done = bytearray(), 0
    for segment in segments:
        for data in _read_segment_pieces(tree, segment):
            ready += deflate.compress(data)
            done += len(data)
            if len(ready) >= PIECE_BYTES:
                yield bytes(ready), done
                ready.clear()
    ready += deflate.flush()
    yield bytes(ready), done


def _choose_compression_level(tree: FileTree, segments: Sequence[_Segment]) -> int:
    """Return the compression level: 1, or 0 if a sample from all parts shows that they are compressed already.

    Level 1 compresses 50 MB of sources to 18 MB in 0.45 s, less than the time that this saves in encryption for two
    nodes; level 6 takes 1.25 s for 16 MB.
    """
    sample = bytearray()
    for segment in segments[:: max(1, len(segments) // SAMPLES)]:
        sample += next(_read_segment_pieces(tree, segment), b"")[:SAMPLE_BYTES]
    return 1 if len(zlib.compress(bytes(sample), 1)) < 0.9 * len(sample) else 0


def _read_segment_pieces(tree: FileTree, segment: _Segment) -> Iterator[bytes]:
    """Yield the contents of a part of a file in pieces; the file must be as long as in the scan."""
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
        raise _FileChangedError(path, f"a file can no longer be read: {exc.strerror}") from exc
    if len(data) != remaining:
        raise _FileChangedError(path, "a file changed while it was being pushed")
    yield data


def _ignore_progress(sent_bytes: int, of_bytes: int, note: str = "", /) -> None:
    """Ignore reports of progress, for a caller that shows none."""


def report_after(before_bytes: int, progress: PushReport) -> PushReport:
    """Return a report for a push that follows another one of so many bytes of contents."""
    return lambda sent, of, note="": progress(before_bytes + sent, before_bytes + of, note)


def push_tree_to_node(
    link: NodeLink,
    tree: FileTree,
    *,
    shared: PayloadCache,
    store: str = "code",
    progress: PushReport = _ignore_progress,
) -> PushResult:
    """Bring a tree to one node.

    Args:
        link: link to dtctl's program on the node, which waits for a message.
        tree: the tree to bring.
        store: folder on the node, `code` or `data`.
        shared: cache that is the same for all nodes of a launch.
        progress: called with the progress, and with notes.

    Raises:
        NodeError: the node cannot store the tree.
        TransferError: the received data differ from the sent data, or a file changed meanwhile.
        ConnectError: the link is gone.
    """
    link.send(PushTree(tree=tree.digest, store=store))
    answer = _receive_push_state(link, "have", "want-manifest")
    if answer.state == "have":
        return PushResult(
            path=_require_tree_folder(answer, tree, store, link.node), state="have", files_sent=0, bytes_sent=0
        )
    manifest = shared.manifest(tree)
    indexes: tuple[int, ...] = ()
    bytes_sent = len(manifest)
    try:
        link.send_bytes(manifest)
        link.send(PushManifestEnd())
        indexes = _require_needed_indexes(_receive_push_state(link, "need"), tree, link.node)
        content_bytes = sum(tree.files[index].size for index in indexes)
        progress(0, content_bytes)
        relay = shared.relay
        if relay is not None and relay.is_worthwhile(content_bytes):
            done, relayed_bytes = _push_blocks(link, tree, indexes, shared, relay, progress)
            bytes_sent += relayed_bytes
        else:
            for chunk, content in shared.pieces(tree, _build_whole_segments(tree, indexes)):
                link.send_bytes(chunk)
                bytes_sent += len(chunk)
                progress(content, content_bytes)
            link.send(PushEnd())
            done = _receive_push_state(link, "done")
    except _FileChangedError as exc:
        raise TransferError(str(exc), node=link.node, where=exc.path, hint="launch again") from exc
    except ConnectError:
        _receive_push_state(link)  # A node that refuses sends its reason, and then no longer reads.
        raise
    if done.digest != tree.digest:
        raise TransferError("the node has a different tree from the one that was sent", node=link.node)
    return PushResult(
        path=_require_tree_folder(done, tree, store, link.node),
        state="done",
        files_sent=len(indexes),
        bytes_sent=bytes_sent,
        content_bytes=content_bytes,
    )


def _push_blocks(
    link: NodeLink,
    tree: FileTree,
    indexes: tuple[int, ...],
    shared: PayloadCache,
    relay: BlockRelay,
    progress: PushReport,
) -> tuple[PushState, int]:
    """Let a node fetch its blocks from others or from here; return its last answer and the bytes sent from here."""
    digests = shared.digests(tree, indexes)
    certificate, key = relay.key_pair()
    link.send(PushRelay(certificate=certificate, key=key))
    link.send_bytes(b"".join(digests))
    link.send(PushManifestEnd())
    answer = _receive_push_state(link, "blocks")
    cut = _build_segment_blocks(tree, indexes)
    if not all(number < len(cut) for number in answer.blocks):
        raise TransferError("the node requested blocks that are not in the tree", node=link.node)
    missing = [cut[number] for number in answer.blocks]
    sizes = [sum(length for _, _, length in block) for block in missing]
    in_other_trees = sum(tree.files[index].size for index in indexes) - sum(sizes)
    got = list(itertools.accumulate(sizes, initial=in_other_trees))
    count, bytes_sent = 0, 32 * len(digests)

    def note(text: str) -> None:
        progress(got[count], got[-1], text)

    member = relay.join(link.node, answer, note)
    is_dead = True
    try:
        while True:
            source = relay.choose_source(member)
            if source is None:
                segments = [segment for block in missing[count:] for segment in block]
                rest = report_after(got[count], progress)
                bytes_sent += _send_rest(link, tree, segments, shared, rest)
                answer = _receive_push_state(link, "done")
            else:
                link.send(PushSource(address=source.address, port=source.port))
                while (answer := _receive_push_state(link, "got", "source-failed", "done")).state == "got":
                    count = _require_block_count(answer, count, len(missing), link.node)
                    relay.count_relayed_block()
                    progress(got[count], got[-1])
            if answer.state == "done":
                is_dead = False
                return answer, bytes_sent
            relay.fail(member, answer, note)
    finally:
        relay.remove_member(member, is_dead=is_dead)


def _require_block_count(answer: PushState, before: int, limit: int, node: str) -> int:
    if not before < answer.count <= limit:
        raise TransferError(f"the node counts {answer.count} blocks of {limit}", node=node)
    return answer.count


def _send_rest(
    link: NodeLink, tree: FileTree, segments: list[_Segment], shared: PayloadCache, progress: PushReport
) -> int:
    """Send a node all blocks that it has not got from others; return the number of bytes."""
    link.send(PushSource())
    sent, of = 0, sum(length for _, _, length in segments)
    for chunk, content in shared.pieces(tree, segments):
        link.send_bytes(chunk)
        sent += len(chunk)
        progress(content, of)
    link.send(PushEnd())
    return sent


def _require_needed_indexes(answer: PushState, tree: FileTree, node: str) -> tuple[int, ...]:
    indexes = answer.indexes
    if len(set(indexes)) < len(indexes) or not all(index < len(tree.files) for index in indexes):
        raise TransferError("the node requested files that are not in the tree, or one file twice", node=node)
    return tuple(indexes)


def _require_tree_folder(answer: PushState, tree: FileTree, store: str, node: str) -> str:
    """Return the folder of the tree from the node's answer; its name must be that of the tree."""
    path = answer.path
    folder, name = posixpath.split(path)
    if not path.startswith("/") or posixpath.basename(folder) != store or name.partition(".")[0] != tree.digest:
        raise TransferError(f"the node reported that the code lies in {quote_node_value(path)}", node=node)
    return path


def _receive_push_state(link: NodeLink, *states: str) -> PushState:
    """Return the node's next message.

    Raises:
        NodeError: the node refuses the push.
        TransferError: the received data differ from the sent data, or the message is none of `states`.
        ConnectError: the link is gone.
    """
    document = link.receive_json()
    if document is None:
        raise ConnectError("the link was lost during the push", node=link.node)
    message = parse_message(document, index_message_types(PushState, Refusal), node=link.node)
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
