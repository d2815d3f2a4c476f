"""Copies from node to node of the files that workers write into the folders of `job.shared`.

Each round lists the folders on all nodes, determines the missing files (checkpoint_sets.py), and lets nodes fetch them
in blocks from the node that has them and from each other (relay.py), or through this machine if nodes cannot reach each
other. A node decides only about its own files: names must be names of files in the shared folders, blocks are
identified by their digests, and no data are unpickled.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

from dtctl import folders
from dtctl.errors import ConnectError, DtctlError, NodeError, TransferError
from dtctl.launch.control.link import NodeLink, open_node, quote_node_value
from dtctl.launch.files.checkpoint_sets import CopyPlan, LostNode, MissingFileCopy, NodeFiles, plan_copies
from dtctl.launch.files.push import HINTS
from dtctl.launch.files.relay import BlockRelay, make_key_pair
from dtctl.supervisor import frames, relay, shared
from dtctl.supervisor.messages.base import Quit, Refusal
from dtctl.supervisor.messages.setup import PushEnd, PushManifestEnd, PushRelay, PushSource, PushState
from dtctl.supervisor.messages.shared import (
    FILES,
    CommitShared,
    FetchShared,
    ListShared,
    OfferShared,
    QuarantineShared,
    RemoveShared,
    SendShared,
    SharedCommitted,
    SharedFile,
    SharedListed,
    SharedOffer,
    SharedOfferEnd,
    SharedRows,
)
from dtctl.transport.base import Target, Transport
from dtctl.transport.fanout import fan_out

SILENCE_S: Final = 60.0
"""Seconds that a node may be silent during a request; while it reads files, it reports every second."""
TAKE_SILENCE_S: Final = 600.0
"""Seconds that a node may be silent while it waits for blocks that others have not got yet, or for other nodes."""
SHARE_BESIDE: Final = 0.25
"""Share of a link's speed that copies take while workers use it."""
NAMED: Final = 3
"""Most checkpoints that a note names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyNode:
    """A node of a run, or a spare."""

    target: Target
    python: str | None
    workdir: str
    is_spare: bool = False


@dataclass(slots=True, kw_only=True)
class CopyResult:
    """Result of one round."""

    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    notes: list[tuple[str | None, str]] = field(default_factory=list)
    """Texts of notes, each with its node; None: the note is not about one node."""
    listed: dict[str, NodeFiles] = field(default_factory=dict)
    rules: set[tuple[str, str]] = field(default_factory=set)
    checkpoints: int = 0
    """Number of checkpoints that a program can resume from."""


class _SharedFolderNode:
    """A node with a separate link for copies, its listed files, and the blocks that it serves."""

    def __init__(self, node: CopyNode, run: str, roots: Sequence[str], transport: Transport) -> None:
        self.name = node.target.name
        self._run, self._roots = run, list(roots)
        self._context: AbstractContextManager[NodeLink] = open_node(
            transport,
            node.target,
            self._build_list_request(),
            python=node.python,
            workdir=node.workdir,
            silence_s=SILENCE_S,
        )
        self.link = self._context.__enter__()
        self.is_asked = True
        self.lock = threading.Lock()
        """Lock of the link, since several nodes may request blocks over it."""
        self.paths: list[str] = []
        self.files = NodeFiles(node=self.name, store="", files={})
        self.skipped: list[str] = []
        self.digests: dict[str, list[bytes]] = {}
        """Digests of the blocks of each offered file."""
        self.numbers: dict[bytes, int] = {}
        """Number of each offered block, by digest."""
        self.serves = PushState(state="blocks")

    def _build_list_request(self) -> ListShared:
        return ListShared(run=self._run, paths=self._roots)

    @contextlib.contextmanager
    def _limiting_silence(self) -> Iterator[NodeLink]:
        """Limit the silence of the node during a request."""
        clock = self.link.clock
        if clock is not None:
            clock.reset()
        try:
            yield self.link
        finally:
            if clock is not None:
                clock.cancel()

    def list_files(self) -> NodeFiles:
        """Request and return the list of the node's files."""
        with self._limiting_silence() as link:
            if not self.is_asked:
                link.send(self._build_list_request())
            self.is_asked = False
            files: dict[str, SharedFile] = {}
            removed: set[str] = set()
            self.paths = []
            while isinstance(answer := link.expect(SharedRows, SharedListed), SharedRows):
                for row in answer.rows:
                    _require_path(row.path, self._roots, self.name)
                    if row.path in files or len(files) >= FILES:
                        raise NodeError("the node listed one file twice, or too many", node=self.name)
                    files[row.path] = row
                    self.paths.append(row.path)
                removed.update(answer.removed)
        if any(str(parent) in files for path in files for parent in PurePosixPath(path).parents):
            raise NodeError("the node listed a file as a folder, too", node=self.name)
        assert isinstance(answer, SharedListed)  # noqa: S101 - no other type can be returned
        self.skipped = answer.skipped
        self.files = NodeFiles(node=self.name, store=answer.store, files=files, removed=removed)
        return self.files

    def offer(self, paths: Sequence[str], pair: tuple[str, str]) -> list[str]:
        """Let the node serve files; return the paths of those that have changed meanwhile."""
        chosen = self._find_indexes(paths)
        with self._limiting_silence() as link:
            link.send(OfferShared(files=chosen, certificate=pair[0], key=pair[1]))
            answer = link.expect(SharedOffer)
            packed = bytearray()
            while (frame := link.receive()) is not None and frame[0] == frames.BYTES:
                packed += frame[2]
            if frame is None:
                raise link.closed_error()
            link.parse(frame[2], SharedOfferEnd)
        gone = {self.paths[index] for index in answer.gone if index < len(self.paths)}
        digests = iter([bytes(packed[start : start + 32]) for start in range(0, len(packed), 32)])
        self.digests, self.numbers = {}, {}
        for path in paths:
            if path in gone:
                continue
            blocks = relay.split_file_blocks([self.files.files[path].size])
            self.digests[path] = [digest for _, digest in zip(blocks, digests, strict=False)]
            if [len(digest) for digest in self.digests[path]] != [32] * len(blocks):
                raise NodeError("the node sent digests for other blocks than it was asked for", node=self.name)
        offered = [digest for of_file in self.digests.values() for digest in of_file]
        # Several blocks may have the same contents; the first of them is requested.
        self.numbers = {digest: number for number, digest in reversed(list(enumerate(offered)))}
        self.serves = PushState(state="blocks", address=answer.address, port=answer.port, code=answer.code)
        return sorted(gone)

    def send_blocks(self, digests: Sequence[bytes], sizes: Mapping[bytes, int]) -> Iterator[bytes]:
        """Yield the contents of blocks, which the node sends to this machine."""
        with self.lock, self._limiting_silence() as link:
            link.send(SendShared(blocks=[self.numbers[digest] for digest in digests]))
            for digest in digests:
                left = sizes[digest]
                while left:
                    frame = link.receive()
                    if frame is None:
                        raise link.closed_error()
                    if frame[0] != frames.BYTES or len(frame[2]) > left:
                        link.parse(frame[2], Refusal)
                        raise NodeError("the node sent a block in the wrong order", node=self.name)
                    left -= len(frame[2])
                    yield frame[2]

    def set_aside(self, paths: Sequence[str]) -> SharedCommitted:
        """Move files out of the node's shared folders."""
        return self._change_files(QuarantineShared(files=self._find_indexes(paths)))

    def remove_copies(self, paths: Sequence[str]) -> SharedCommitted:
        """Remove copies whose originals were removed."""
        return self._change_files(RemoveShared(files=self._find_indexes(paths)))

    def _find_indexes(self, paths: Sequence[str]) -> list[int]:
        indexes = {path: index for index, path in enumerate(self.paths)}
        return [indexes[path] for path in paths]

    def _change_files(self, request: QuarantineShared | RemoveShared) -> SharedCommitted:
        with self._limiting_silence() as link:
            link.send(request)
            return link.expect(SharedCommitted)

    def close(self) -> None:
        """End the program on the node."""
        with contextlib.suppress(DtctlError, OSError):
            self.link.send(Quit())
        with contextlib.suppress(DtctlError, OSError):
            self._context.__exit__(None, None, None)


def _require_path(path: str, roots: Sequence[str], node: str) -> None:
    parts = path.split("/")
    if not all(map(folders.is_name, parts)) or (roots and not shared.find_shared_root(path, list(roots))):
        raise NodeError(f"the node listed {quote_node_value(path)}, which is not a file of a shared folder", node=node)


class _CompletionBarrier:
    """Barrier for nodes that get files: all of them serve blocks until the last one has its own."""

    def __init__(self, count: int) -> None:
        self._left, self._news = count, threading.Condition()

    def count_arrival(self) -> None:
        with self._news:
            self._left -= 1
            self._news.notify_all()

    def wait(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._left <= 0)


class CopyRounds:
    """Rounds of copies over the nodes of a run; the links are kept from one round to the next."""

    def __init__(self, run: str, roots: Sequence[tuple[str, str]], transport: Transport, *, share: float) -> None:
        self._run, self._roots, self._transport, self._share = run, list(roots), transport, share
        self._listed: dict[str, _SharedFolderNode] = {}
        self._retry_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._taking: set[NodeLink] = set()
        self._is_closed = False

    def close(self) -> None:
        """Close all links; a round that has not finished ends with errors."""
        with self._lock:
            self._is_closed = True
            links, taking, self._listed = list(self._listed.values()), list(self._taking), {}
        for link in taking:
            link.stream.close()
        for each in links:
            each.close()

    def run(self, nodes: Sequence[CopyNode], *, stopped_s: float | None, lost: Sequence[LostNode] = ()) -> CopyResult:
        """Copy the files that nodes lack; nodes that do not answer are left out."""
        result, began = CopyResult(), time.monotonic()
        answers = fan_out({node.target.name: node for node in nodes}, self._list_node_files)
        listed = {name: answer for name, answer in answers.items() if isinstance(answer, NodeFiles)}
        result.listed = listed
        for node in nodes:
            error = answers[node.target.name]
            if stopped_s is not None and isinstance(error, DtctlError) and not node.is_spare:
                result.notes.append((node.target.name, f"its files of job.shared could not be listed: {error.message}"))
        stopped_s = None if stopped_s is None else stopped_s + time.monotonic() - began
        plan = plan_copies(list(listed.values()), self._roots, stopped_s=stopped_s, lost=lost)
        result.rules, result.checkpoints = plan.rules, plan.complete + len(plan.doubtful)
        result.notes += [
            (name, f"ignored for job.shared: {text}")
            for name in listed
            for text in self._require_listed_node(name).skipped
        ]
        self._remove_copies(plan, result)
        self._set_aside(plan, result)
        if plan.copies:
            self._copy_between_nodes(plan.copies, {node.target.name: node for node in nodes}, result)
        result.seconds = time.monotonic() - began
        return result

    def _list_node_files(self, node: CopyNode) -> NodeFiles:
        name = node.target.name
        if time.monotonic() < self._retry_s.get(name, 0.0):
            raise ConnectError("it did not answer", node=name)
        try:
            if name not in self._listed:
                listed = _SharedFolderNode(node, self._run, [root for root, _ in self._roots], self._transport)
                with self._lock:
                    if not self._is_closed:
                        self._listed[name] = listed
                if self._is_closed:
                    listed.close()
                    raise ConnectError("the copies were ended", node=name)
            return self._listed[name].list_files()
        except DtctlError:
            self._retry_s[name] = time.monotonic() + SILENCE_S
            if (old := self._listed.pop(name, None)) is not None:
                old.close()
            raise

    def _require_listed_node(self, name: str) -> _SharedFolderNode:
        """Return a node that has listed its files.

        Raises:
            ConnectError: the copies were ended meanwhile.
        """
        found = self._listed.get(name)
        if found is None:
            raise ConnectError("the copies were ended", node=name)
        return found

    def _remove_copies(self, plan: CopyPlan, result: CopyResult) -> None:
        for node, paths in plan.removals.items():
            try:
                problem = self._require_listed_node(node).remove_copies(paths).problem
            except DtctlError as exc:
                problem = exc.message
            if problem:
                result.notes.append((node, f"not removed, as on the node that wrote it: {problem}"))

    def _set_aside(self, plan: CopyPlan, result: CopyResult) -> None:
        for node, paths in plan.aside.items():
            try:
                kept = self._require_listed_node(node).set_aside(paths)
            except DtctlError as exc:
                result.notes.append((node, f"possibly incomplete files stay where they are: {exc.message}"))
                continue
            names = sorted(set(plan.aside_names))
            more = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
            text = f"{', '.join(names[:NAMED])}{more} may not be complete: moved to {kept.folder}"
            result.notes.append((node, text))
            if kept.problem:
                result.notes.append((node, f"not moved: {kept.problem}"))
        for name in plan.doubtful:
            result.notes.append((None, f"{name} may be incomplete, but is copied, since there is no other one"))

    def _copy_between_nodes(
        self, copies: Mapping[str, list[MissingFileCopy]], nodes: Mapping[str, CopyNode], result: CopyResult
    ) -> None:
        wanted: dict[str, dict[str, None]] = {}
        for rows in copies.values():
            for row in rows:
                wanted.setdefault(row.source, {})[row.path] = None
        pair = make_key_pair()
        offers = fan_out(
            {name: (name, list(paths)) for name, paths in wanted.items()},
            lambda item: self._require_listed_node(item[0]).offer(item[1], pair),
        )
        served = {name for name, answer in offers.items() if isinstance(answer, list)}
        for name, answer in offers.items():
            if isinstance(answer, DtctlError):
                result.notes.append((name, f"its files were not copied: {answer.message}"))
        # A checkpoint is copied completely or not at all: one of its files may have changed meanwhile.
        partial = {
            row.checkpoint
            for rows in copies.values()
            for row in rows
            if row.source not in served or row.path not in self._require_listed_node(row.source).digests
        }
        todo = {node: [row for row in rows if row.checkpoint not in partial] for node, rows in copies.items()}
        todo = {node: rows for node, rows in todo.items() if rows}
        relays: dict[tuple[str, frozenset[str]], BlockRelay] = {}
        done, notes = _CompletionBarrier(len(todo)), _UniqueNotes()

        def take(item: tuple[CopyNode, list[MissingFileCopy]]) -> tuple[int, int]:
            return self._copy_to_node(item[0], item[1], pair, relays, done, notes)

        # All nodes run at once, since they wait for each other.
        answers = fan_out(
            {node: (nodes[node], rows) for node, rows in todo.items()}, take, max_parallel=max(1, len(todo))
        )
        result.notes += [(None, text) for text in notes.texts]
        for node, taken in answers.items():
            if isinstance(taken, DtctlError):
                result.notes.append((node, f"files of job.shared were not copied to it: {taken.message}"))
            else:
                result.files, result.bytes = result.files + taken[0], result.bytes + taken[1]

    def _copy_to_node(
        self,
        node: CopyNode,
        rows: list[MissingFileCopy],
        pair: tuple[str, str],
        relays: dict[tuple[str, frozenset[str]], BlockRelay],
        done: _CompletionBarrier,
        notes: _UniqueNotes,
    ) -> tuple[int, int]:
        """Let a node fetch files; return the numbers of files and bytes."""
        order = FetchShared(run=self._run, paths=[root for root, _ in self._roots], share=self._share)
        has_arrived = False
        try:
            with open_node(
                self._transport, node.target, order, python=node.python, workdir=node.workdir, silence_s=TAKE_SILENCE_S
            ) as link:
                with self._lock:
                    self._taking.add(link)
                try:
                    self._transfer_copied_files(link, rows, pair, relays, notes)
                    has_arrived = True
                    done.count_arrival()
                    if link.clock is not None:
                        link.clock.cancel()  # Other nodes may fetch from this one for any time.
                    done.wait()
                    if link.clock is not None:
                        link.clock.reset()
                    link.send(CommitShared())
                    kept = link.expect(SharedCommitted)
                    if kept.problem:
                        notes(f"not copied to {node.target.name}: {kept.problem}")
                    link.send(Quit())
                    return kept.files, sum(row.file.size for row in rows)
                finally:
                    with self._lock:
                        self._taking.discard(link)
        finally:
            if not has_arrived:
                done.count_arrival()

    def _transfer_copied_files(
        self,
        link: NodeLink,
        rows: list[MissingFileCopy],
        pair: tuple[str, str],
        relays: dict[tuple[str, frozenset[str]], BlockRelay],
        notes: _UniqueNotes,
    ) -> None:
        sources = list(dict.fromkeys(row.source for row in rows))
        files = [
            {
                "path": row.path,
                "size": row.file.size,
                "mtime_ns": row.file.mtime_ns,
                "origin": row.origin,
                "group": sources.index(row.source),
            }
            for row in rows
        ]
        link.send_bytes(zlib.compress(json.dumps(files).encode(), 1))
        link.send(PushManifestEnd())
        link.send(PushRelay(certificate=pair[0], key=pair[1]))
        link.send_bytes(
            b"".join(digest for row in rows for digest in self._require_listed_node(row.source).digests[row.path])
        )
        link.send(PushManifestEnd())
        state = self._require_push_state(link, "blocks")
        have: set[bytes] = set()
        for source in sources:
            of_source = [row for row in rows if row.source == source]
            sizes = self._compute_block_sizes(of_source)
            wanted = [digest for digest in sizes if digest not in have]
            have |= sizes.keys()
            if self._require_push_state(link, "need").count != len(wanted):
                raise TransferError("the node requested blocks that it was not offered", node=link.node)
            if wanted:
                self._relay_source_blocks(link, state, of_source, wanted, sizes, relays, notes)
            else:
                self._require_push_state(link, "done")

    def _compute_block_sizes(self, rows: Sequence[MissingFileCopy]) -> dict[bytes, int]:
        """Return the size in bytes of each block of the files, by digest."""
        sizes: dict[bytes, int] = {}
        for row in rows:
            blocks = relay.split_file_blocks([row.file.size])
            for digest, segments in zip(self._require_listed_node(row.source).digests[row.path], blocks, strict=True):
                sizes.setdefault(digest, sum(length for _, _, length in segments))
        return sizes

    def _relay_source_blocks(
        self,
        link: NodeLink,
        state: PushState,
        rows: Sequence[MissingFileCopy],
        wanted: list[bytes],
        sizes: Mapping[bytes, int],
        relays: dict[tuple[str, frozenset[str]], BlockRelay],
        notes: _UniqueNotes,
    ) -> None:
        """Let a node fetch the blocks that one node has, from that node or from others that fetch the same blocks."""
        source = self._require_listed_node(rows[0].source)
        with self._lock:
            key = (source.name, frozenset(row.path for row in rows))
            if key not in relays:
                relays[key] = BlockRelay(0)
                relays[key].join(source.name, source.serves, notes)
            plan = relays[key]
        member, is_dead, count, before = plan.join(link.node, state, notes), True, 0, 0
        try:
            while True:
                chosen = plan.choose_source(member)
                if chosen is None:
                    self._pass_on(link, source, wanted[count:], sizes)
                    answer = self._require_push_state(link, "done")
                else:
                    link.send(PushSource(address=chosen.address, port=chosen.port))
                    while (answer := self._require_push_state(link, "got", "source-failed", "done")).state == "got":
                        if not before < answer.count <= len(wanted):
                            raise TransferError("the node counts more blocks than there are", node=link.node)
                        count = before = answer.count
                        plan.count_relayed_block()
                if answer.state == "done":
                    is_dead = False
                    return
                plan.fail(member, answer, notes)
        finally:
            plan.remove_member(member, is_dead=is_dead)

    def _pass_on(
        self, link: NodeLink, source: _SharedFolderNode, digests: list[bytes], sizes: Mapping[bytes, int]
    ) -> None:
        """Send blocks that another node has to a node, through this machine."""
        link.send(PushSource())
        deflate, pace = zlib.compressobj(0), relay.RateLimiter(self._share)
        for payload in source.send_blocks(digests, sizes):
            link.send_bytes(deflate.compress(payload))
            pace.wait(len(payload))
        link.send_bytes(deflate.flush())
        link.send(PushEnd())

    def _require_push_state(self, link: NodeLink, *states: str) -> PushState:
        answer = link.expect(PushState)
        if answer.state == "error":
            kind = TransferError if answer.code == "digest" else NodeError
            raise kind(answer.message, node=link.node, hint=HINTS.get(answer.code))
        if answer.state not in states:
            raise TransferError(
                f"the node sent {quote_node_value(answer.state)}, which is not valid here", node=link.node
            )
        return answer


class _UniqueNotes:
    """Texts for the user, without repetitions."""

    def __init__(self) -> None:
        self.texts: dict[str, None] = {}

    def __call__(self, text: str) -> None:
        self.texts[text] = None
