"""The node's end of a push: it stores trees of files below the workdir, requests missing files and checks all digests.

    WORKDIR/code/TREE          the files of one tree; several runs may use it, so dtctl never changes it
    WORKDIR/code/TREE.json     the seal: the written files, with their `lstat` results; locked by each user of the tree
    WORKDIR/code/.lock         locked while trees are searched (shared), or named and removed (exclusive)
    WORKDIR/data               the same for data, which only `dtctl clean` removes
    WORKDIR/code/.dtctl        marks the store as one of dtctl; without it no file is ever removed there

A tree that matches its seal is used unchanged. If it was changed, another folder (TREE.1, ...) is made next to it from
the files that are still good on this node and the files that are sent. Paths, sizes and links from the sender are not
trusted. A file is a row of path, mode, size in bytes, SHA-256 and link (`TreeFile` in dtctl/launch/files/tree.py).
Stdlib only, Python 3.8.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import zlib

from dtctl import folders
from dtctl.supervisor import facts, frames
from dtctl.supervisor.messages.setup import PushEnd, PushManifestEnd, PushRelay, PushSource, PushState

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from dtctl.supervisor import relay

LINK_MODE = 0o120000
KEPT_TREES = 3
STORES = ("code", "data")
MAX_MANIFEST_BYTES = 256 << 20
CHUNK_BYTES = 1 << 18

_servers: list = []  # type: ignore[type-arg]
"""Servers of blocks that were pushed to this node; see `stop_serving`."""
_locks_in_use: list[int] = []
"""Descriptors of the seals of used trees, which stay open as long as this process and its children live."""


class PushRefused(Exception):
    """The push is refused; the sender has received the reason."""


class PushProblem(Exception):
    """Refusal of the sent data; `code` is for the sender."""

    def __init__(self, code: str, text: str) -> None:
        """Store the code and the text of the refusal."""
        super().__init__(text)
        self.code = code


def receive_tree(link: frames.FdLink, workdir: str, tree: str, kind: str = "code") -> str:
    """Store a tree on this node; return its folder, which is not removed while this process lives.

    Args:
        link: link to the control machine.
        workdir: workdir of this node.
        tree: digest of the tree.
        kind: store of the tree: `code`, where new trees replace old ones, or `data`.

    Raises:
        PushRefused: the tree could not be stored. No incomplete tree is left, and the sender has received the reason.
    """
    store = os.path.join(workdir, kind)
    try:
        if kind not in STORES:
            raise PushProblem("escape", f"{kind!r} is no store of trees")
        return _PushReceiver(link, store, tree).run()
    except PushProblem as exc:
        code, text = exc.code, str(exc)
    except folders.NotPrivateError as exc:
        code, text = "foreign", str(exc)
    except OSError as exc:
        if exc.errno == errno.EPIPE:
            raise  # The control machine is gone.
        code, text = facts.choose_hint_code(exc), f"{exc.strerror} in {store}"
    except zlib.error as exc:
        code, text = "digest", f"the stream is damaged: {exc}"
    link.send_json(PushState(state="error", code=code, message=text))
    raise PushRefused(text)


def stop_serving() -> None:
    """Stop serving blocks to other nodes, and wait until all threads of the servers have ended."""
    while _servers:
        _servers.pop().close()


def find_stored_tree(workdir: str, tree: str, kind: str) -> str:
    """Return the folder of a stored, unchanged tree, which is not removed while this process lives; empty: none."""
    store = os.path.join(workdir, kind)
    if not os.path.isdir(store):
        return ""
    with _FileLock(os.path.join(store, ".lock"), fcntl.LOCK_SH, os.O_CREAT):
        return _find_unchanged_tree(store, tree)


def lock_stored_tree(path: str) -> int:
    """Lock a tree against removal while the returned descriptor, or a copy of it, is open."""
    return _FileLock(path + ".json", fcntl.LOCK_SH).fd


def leads_out(path: bytes, link: bytes, links: dict[bytes, bytes]) -> bool:
    """Return whether a link at `path` leads out of the tree, directly or through one of the other links."""
    at = path.split(b"/")[:-1]
    for part in link.split(b"/"):
        if b"/".join(at) in links or (part == b".." and not at):
            return True
        if part == b"..":
            at.pop()
        elif part not in (b"", b"."):
            at.append(part)
    return link[:1] in (b"", b"/") or b"\0" in link


class _FileLock:
    """Lock on a file, used as a context or left open; without effect on file systems without locks."""

    def __init__(self, path: str, kind: int, create: int = 0) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | create, 0o600)
        try:
            fcntl.flock(self.fd, kind)
            self.is_held = True
        except OSError:
            self.is_held = False

    def __enter__(self) -> _FileLock:  # noqa: PYI034 - Self would have to come from typing
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


class BlockReceiver:
    """Receiver of contents over a link, or in blocks from other nodes."""

    def __init__(self, link: frames.FdLink) -> None:
        """Receive over the link to the control machine."""
        self.link = link

    def pieces(self, end: str):  # type: ignore[no-untyped-def]  # Iterator would have to come from typing
        """Yield the payloads of BYTES frames up to the message `end`."""
        while True:
            frame = self.link.receive()
            if frame is None:
                raise PushProblem("protocol", "the sender has gone")
            kind, _, payload = frame
            if kind == frames.JSON and frames.decode_message(payload).get("op") == end:
                return
            if kind != frames.BYTES or not payload:
                raise PushProblem("protocol", f"expected file contents, got {payload[:80]!r}")
            yield payload

    def serve(self, request: PushRelay, store: relay.BlockFiles, folder: str):  # type: ignore[no-untyped-def]
        """Serve blocks to other nodes; return the state to report, and the keys for fetching, or None."""
        from dtctl.supervisor import relay

        contexts: tuple[relay.Context, relay.Context]
        code = ""
        try:
            try:
                contexts = relay.make_contexts(request.certificate, request.key, folder)
            except ImportError:
                contexts = (relay.make_hmac_context(request.key),) * 2
                code = "no-ssl"
            ticket_key = relay.make_ticket_key(request.key)
            server = relay.BlockServer(store, contexts[0], ticket_key)
        except (OSError, RuntimeError) as exc:
            return PushState(state="blocks", code="no-port", message=str(exc)), None
        _servers.append(server)
        state = PushState(state="blocks", code=code, address=facts.find_server_address(), port=server.port)
        return state, (contexts[1], ticket_key)

    def fetch(
        self,
        store: relay.BlockFiles,
        wanted: list,  # type: ignore[type-arg]
        fetching: relay.FetchKeys | None,
        pace: relay.RateLimiter | None = None,
    ) -> None:
        """Fetch blocks from nodes that the control machine names, and the rest from it; `pace` limits the speed."""
        from dtctl.supervisor import relay

        count = 0
        while True:
            document = self.link.receive_json()
            if document is None:
                raise PushProblem("protocol", "the sender has gone")
            if document.get("op") != PushSource.op:
                raise PushProblem("protocol", "expected the source of blocks")
            source = PushSource.parse(document)
            left = [digest for digest in wanted if not store.has(digest)]
            if not source.port or fetching is None:
                self.receive_blocks(store, left)
                return
            if not left:
                return
            try:
                for digest in relay.fetch_node_blocks(store, left, source.address, source.port, fetching):
                    count += 1
                    if pace is not None:
                        pace.wait(store.size(digest))
                    self.link.send_json(PushState(state="got", count=count))
                return
            except relay.SourceFailed as exc:
                self.link.send_json(PushState(state="source-failed", code=exc.code, message=str(exc)))

    def receive_blocks(self, store: relay.BlockFiles, digests: list) -> None:  # type: ignore[type-arg]
        """Write the blocks that come over the link in one zlib stream."""
        inflate = zlib.decompressobj()
        ready = bytearray()
        todo = list(reversed(digests))
        for piece in self.pieces(PushEnd.op):
            while piece:
                limit = store.size(todo[-1]) - len(ready) if todo else 1
                ready += inflate.decompress(piece, limit)
                piece = inflate.unconsumed_tail
                if not todo and ready:
                    raise PushProblem("escape", "what was sent differs from what was announced")
                if todo and len(ready) == store.size(todo[-1]):
                    if not store.write(todo.pop(), memoryview(bytes(ready))):
                        raise PushProblem("digest", "a block differs from the one announced")
                    ready.clear()
        if todo or inflate.unused_data or (digests and not inflate.eof):
            raise PushProblem("digest", "the stream differs from what was announced")


class _PushReceiver(BlockReceiver):
    """Receiver of a single push into a single store."""

    def __init__(self, link: frames.FdLink, store: str, tree: str) -> None:
        if len(tree) != 32 or tree.strip("0123456789abcdef"):
            raise PushProblem("escape", f"{tree!r} is not the digest of a tree")
        folders.make_private(store)
        self.cleans = folders.mark_own_folder(store, _is_ours)
        super().__init__(link)
        self.store = store
        self.tree = tree
        self.partial_path = os.path.join(store, f".part-{os.getpid()}-{os.urandom(4).hex()}")
        self.partial_fd = -1

    def run(self) -> str:
        """Carry out the push; return the folder of the tree."""
        with self._lock_store(fcntl.LOCK_SH):
            path = _find_unchanged_tree(self.store, self.tree)
        if path:
            self.link.send_json(PushState(state="have", path=path))
            return path
        self.link.send_json(PushState(state="want-manifest"))
        inflate = zlib.decompressobj()
        manifest = inflate.decompress(b"".join(self.pieces(PushManifestEnd.op)), MAX_MANIFEST_BYTES)
        if inflate.unconsumed_tail:
            raise PushProblem("escape", "the manifest is larger than it may be")
        files = _parse_tree_manifest(manifest, self.tree)
        with self._lock_store(fcntl.LOCK_EX):
            if self.cleans:
                _prune_tree_store(self.store)
            # The lock shows other processes that the folder is in use.
            seal = _FileLock(self.partial_path + ".json", fcntl.LOCK_EX, os.O_CREAT)
        with seal:
            try:
                path = self._make_tree(files, seal)
            finally:
                _remove_part(self.partial_path)
        self.link.send_json(PushState(state="done", path=path, digest=self.tree))
        return path

    def _lock_store(self, kind: int) -> _FileLock:
        return _FileLock(os.path.join(self.store, ".lock"), kind, os.O_CREAT)

    def _make_tree(self, files: list, seal: _FileLock) -> str:  # type: ignore[type-arg]
        """Write all files of the tree, and give the folder its name."""
        os.mkdir(self.partial_path, 0o700)
        self.partial_fd = os.open(self.partial_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for folder in sorted(_collect_parent_folders(files)):
                os.mkdir(folder, 0o700, dir_fd=self.partial_fd)
            missing = self._copy_known_files(files)
            first: dict[str, int] = {}
            for index, file in enumerate(files):
                if file[3] in missing and file[1] != LINK_MODE:
                    first.setdefault(file[3], index)  # Contents of several files are sent once.
            need = sorted(first.values())
            self.link.send_json(PushState(state="need", indexes=need))
            if not self._is_relayed([files[index] for index in need]):
                self._receive_contents([files[index] for index in need])
            for index, file in enumerate(files):
                if first.get(file[3], index) != index and file[1] != LINK_MODE:
                    self._write_tree_file(file, _read_file_pieces(self.partial_fd, files[first[file[3]]][0]))
            for path, mode, _, _, link in files:  # Links come last, so that no file is written through one.
                if mode == LINK_MODE:
                    os.symlink(link, path, dir_fd=self.partial_fd)
            return self._publish_tree(files, seal)
        finally:
            os.close(self.partial_fd)

    def _copy_known_files(self, files: list) -> set[str]:  # type: ignore[type-arg]
        """Copy files that other trees on this node have; return the digests of all other files."""
        sources: dict[str, tuple[int, bytes]] = {}
        opened = []
        with self._lock_store(fcntl.LOCK_SH):
            for name in _list_sealed_trees(self.store)[:KEPT_TREES]:
                path = os.path.join(self.store, name)
                if os.path.isdir(path):
                    opened += [lock_stored_tree(path), os.open(path, os.O_RDONLY | os.O_CLOEXEC)]
                    for row in _read_seal(path) or ():
                        sources.setdefault(row[3], (opened[-1], row[0]))
        missing = set()
        for file in files:
            if file[1] != LINK_MODE and not (
                file[3] in sources and self._write_tree_file(file, _read_file_pieces(*sources[file[3]]))
            ):
                missing.add(file[3])
        for fd in opened:
            os.close(fd)
        return missing

    def _write_tree_file(self, file: tuple, pieces) -> bool:  # type: ignore[no-untyped-def, type-arg]
        """Write a file; return whether its digest is the announced one."""
        import hashlib

        total = hashlib.sha256()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(file[0], flags, file[1], dir_fd=self.partial_fd)
        try:
            for piece in pieces:
                total.update(piece)
                while piece:
                    piece = piece[os.write(fd, piece) :]
        finally:
            os.close(fd)
        return bool(total.hexdigest() == file[3])

    def _is_relayed(self, files: list) -> bool:  # type: ignore[type-arg]
        """Receive the contents in blocks if the sender offers this; return whether it does."""
        frame = self.link.receive()
        if frame is None:
            raise PushProblem("protocol", "the sender has gone")
        document = frames.decode_message(frame[2]) if frame[0] == frames.JSON else {}
        if document.get("op") != PushRelay.op:
            self.link.ready.insert(0, frame)
            return False
        from dtctl.supervisor import relay

        request = PushRelay.parse(document)
        packed = b"".join(self.pieces(PushManifestEnd.op))
        blocks = relay.split_file_blocks([file[2] for file in files])
        if len(packed) != 32 * len(blocks):
            raise PushProblem("protocol", "the sender cuts the files into other blocks")
        digests = [packed[start : start + 32] for start in range(0, len(packed), 32)]
        for path, mode, size, _, _ in files:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=self.partial_fd)
            os.truncate(fd, size)
            os.close(fd)
        store = relay.BlockFiles(self.partial_fd, [file[0] for file in files], blocks, digests)
        self._reuse_blocks(files, blocks, digests, store)
        state, fetching = self.serve(request, store, self.partial_path)
        wanted = list(dict.fromkeys(digest for digest in digests if not store.has(digest)))
        numbers = {digest: number for number, digest in reversed(list(enumerate(digests)))}
        state.blocks = [numbers[digest] for digest in wanted]
        self.link.send_json(state)
        self.fetch(store, wanted, fetching)
        for path, _, _, digest, _ in files:
            if not _is_file(self.partial_fd, path, digest):
                raise PushProblem("digest", f"{os.fsdecode(path)!r} has contents that differ from those announced")
        return True

    def _reuse_blocks(self, files: list, blocks: list, digests: list, store: relay.BlockFiles) -> None:  # type: ignore[type-arg]
        """Copy blocks of large files from the same offsets of files with the same name in other trees."""
        large = {
            (files[segments[0][0]][0], segments[0][1]): digest
            for segments, digest in zip(blocks, digests)  # noqa: B905 - Python 3.8 has no strict
            if len(segments) == 1
        }
        with self._lock_store(fcntl.LOCK_SH):
            trees = [os.path.join(self.store, name) for name in _list_sealed_trees(self.store)[:KEPT_TREES]]
            held = [lock_stored_tree(path) for path in trees]
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        for tree in trees:
            for (path, offset), digest in large.items():
                if store.has(digest):
                    continue
                try:
                    fd = os.open(os.path.join(os.fsencode(tree), path), flags)
                except OSError:
                    continue
                try:
                    store.write(digest, memoryview(os.pread(fd, store.size(digest), offset)))
                finally:
                    os.close(fd)
        for fd in held:
            os.close(fd)

    def _receive_contents(self, files: list) -> None:  # type: ignore[type-arg]
        """Write the files that are sent one after another in one zlib stream."""
        sent = self.pieces(PushEnd.op)
        inflate = zlib.decompressobj()
        data = memoryview(b"")

        def take(size: int):  # type: ignore[no-untyped-def]
            nonlocal data
            while size:
                while not data:
                    more = inflate.unconsumed_tail or next(sent, b"")
                    if not more:
                        raise PushProblem("digest", "the stream ended before the last file")
                    data = memoryview(inflate.decompress(more, CHUNK_BYTES))
                piece, data = data[:size], data[size:]
                size -= len(piece)
                yield piece

        for file in files:
            if not self._write_tree_file(file, take(file[2])):
                raise PushProblem(
                    "digest", f"{os.fsdecode(file[0])!r} arrived with contents that differ from those announced"
                )
        rest = inflate.unconsumed_tail or next(sent, b"")
        while rest and not (data or inflate.unused_data):
            data = memoryview(inflate.decompress(rest, 1))
            rest = inflate.unconsumed_tail or next(sent, b"")
        if data or inflate.unused_data or (files and not inflate.eof):
            raise PushProblem("escape", "what was sent differs from what was announced")

    def _publish_tree(self, files: list, seal: _FileLock) -> str:  # type: ignore[type-arg]
        """Seal the folder and give it its name; return its path, or that of the same tree from another push."""
        rows = []
        for path, mode, size, digest, link in files:
            info = os.stat(path, dir_fd=self.partial_fd, follow_symlinks=False)
            row = (path.decode("latin-1"), mode, size, digest, link.decode("latin-1"))
            rows.append((*row, info.st_mtime_ns, info.st_ctime_ns, info.st_ino))
        with open(seal.fd, "wb", closefd=False) as file:
            file.write(json.dumps({"files": rows}, separators=(",", ":")).encode())
        with self._lock_store(fcntl.LOCK_EX):
            path = _find_unchanged_tree(self.store, self.tree)
            if not path:
                path, number = os.path.join(self.store, self.tree), 0
                while os.path.lexists(path):  # The tree in this folder was changed.
                    number += 1
                    path = os.path.join(self.store, f"{self.tree}.{number}")
                os.rename(self.partial_path, path)  # This is first, because it fails if the target is not empty.
                os.rename(self.partial_path + ".json", path + ".json")
                if seal.is_held:
                    fcntl.flock(seal.fd, fcntl.LOCK_UN)
                _locks_in_use.append(lock_stored_tree(path))
        return path


def _find_unchanged_tree(store: str, tree: str) -> str:
    """Return and lock the folder of an unchanged tree; empty if there is none. The caller holds the store's lock."""
    for name in _list_sealed_trees(store):
        path = os.path.join(store, name)
        seal = _read_seal(path) if name.partition(".")[0] == tree else None
        if seal is not None and not _find_changed_files(path, seal):
            _locks_in_use.append(lock_stored_tree(path))
            os.utime(path + ".json")
            return path
    return ""


def _parse_tree_manifest(data: bytes, tree: str) -> list:  # type: ignore[type-arg]
    """Return the rows of a manifest, in which bytes are encoded as latin-1, after checking that all are harmless."""
    import hashlib

    total = hashlib.sha256()
    files = {}
    try:
        for name, mode, size, digest, target in json.loads(data.decode()):
            path, link = name.encode("latin-1"), target.encode("latin-1")
            parts = path.split(b"/")
            if b"" in parts or b"." in parts or b".." in parts or b"\0" in path or path in files:
                raise PushProblem("escape", f"{os.fsdecode(path)!r} is not a path inside the tree, or is listed twice")
            if mode not in (0o600, 0o700, LINK_MODE) or not isinstance(size, int) or size < 0:
                raise PushProblem("protocol", f"{os.fsdecode(path)!r} has an impossible mode or size")
            if mode == LINK_MODE and digest != hashlib.sha256(link).hexdigest():
                raise PushProblem("digest", f"{os.fsdecode(path)!r} is a different link from the one announced")
            files[path] = (path, int(mode), int(size), digest, link)
            total.update(b"%d\0%o\0%s\0%s\0" % (len(path), mode, path, digest.encode()))
    except (ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise PushProblem("protocol", f"the manifest is malformed: {exc}") from exc
    rows = list(files.values())
    if not files.keys().isdisjoint(_collect_parent_folders(rows)):
        raise PushProblem("escape", "a path that must be a folder is a file or a link")
    links = {row[0]: row[4] for row in rows if row[1] == LINK_MODE}
    for path, link in links.items():
        if leads_out(path, link, links):
            raise PushProblem("escape", f"the link {os.fsdecode(path)!r} points outside the tree")
    if total.hexdigest()[:32] != tree:
        raise PushProblem("digest", "the manifest does not belong to the tree")
    return rows


def _collect_parent_folders(files: list) -> set[bytes]:  # type: ignore[type-arg]
    """Return all folders that contain the files."""
    folders = set()
    for file in files:
        folder = file[0].rpartition(b"/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition(b"/")[0]
    return folders


def _read_file_pieces(folder: int, path: bytes):  # type: ignore[no-untyped-def]
    """Yield the readable contents of a file, whose digest the caller checks."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(path, "rb", buffering=0, opener=lambda name, _: os.open(name, flags, dir_fd=folder)) as file:
            for data in iter(lambda: file.read(CHUNK_BYTES) or b"", b""):
                yield memoryview(data)
    except OSError:
        pass


def _is_file(folder: int, path: bytes, digest: str) -> bool:
    """Return whether a file has these contents."""
    import hashlib

    total = hashlib.sha256()
    for data in _read_file_pieces(folder, path):
        total.update(data)
    return total.hexdigest() == digest


def _read_seal(path: str) -> list | None:  # type: ignore[type-arg]
    """Return the rows of the written files, each with mtime, ctime and inode; None if there is no seal."""
    try:
        with open(path + ".json", "rb") as file:
            return [(row[0].encode("latin-1"), *row[1:]) for row in json.loads(file.read().decode())["files"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _find_changed_files(path: str, seal: list) -> set[bytes]:  # type: ignore[type-arg]
    """Return the files of a tree that have changed since they were written; added files do not count."""
    changed = set()
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return {b"", *(row[0] for row in seal)}
    for name, _, size, _, _, mtime_ns, ctime_ns, inode in seal:
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            changed.add(name)
            continue
        if (info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_size) != (mtime_ns, ctime_ns, inode, size):
            changed.add(name)
    os.close(folder)
    return changed


def _is_tree(name: str) -> bool:
    """Return whether this is the name of a tree: a digest, with a number if the digest alone was taken."""
    digest, _, number = name.partition(".")
    return len(digest) == 32 and not digest.strip("0123456789abcdef") and (number.isdigit() or name == digest)


def _is_part(name: str) -> bool:
    """Return whether this is the name of a tree that is being written."""
    fields = name.split("-")
    return len(fields) == 3 and fields[0] == ".part" and fields[1].isdigit() and len(fields[2]) == 8


def _is_ours(name: str) -> bool:
    stem = name[:-5] if name.endswith(".json") else name
    return name in (".lock", folders.MARKER) or _is_tree(stem) or _is_part(stem)


def _list_sealed_trees(store: str) -> list[str]:
    """Return the names of sealed trees, the most recently used first."""
    names = [name[:-5] for name in os.listdir(store) if name.endswith(".json") and _is_tree(name[:-5])]
    return sorted(names, key=lambda name: -os.stat(os.path.join(store, name + ".json")).st_mtime_ns)


def _prune_tree_store(store: str) -> None:
    """Remove the remains of killed pushes, and old unused trees. The caller holds the store's exclusive lock."""
    parts = [name[:-5] for name in os.listdir(store) if name.endswith(".json") and _is_part(name[:-5])]
    old = _list_sealed_trees(store)[KEPT_TREES - 1 :] if os.path.basename(store) == "code" else []
    for name in parts + old:
        path = os.path.join(store, name)
        try:
            lock = _FileLock(path + ".json", fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            continue  # Another push has removed its own incomplete tree.
        with lock as seal:
            if seal.is_held and name in parts:
                _remove_part(path)
            elif seal.is_held:
                _discard_tree(path)


def _discard_tree(path: str) -> None:
    """Remove a tree, except files that a job has added or changed; follow no links."""
    seal = {row[0]: row for row in _read_seal(path) or []}
    changed = _find_changed_files(path, list(seal.values()))
    try:
        top = folders.open_folder(path)
    except OSError:
        return  # A link or another file has replaced the folder.
    try:
        _remove_tree_files(top, b"", {name for name in seal if name not in changed})
    finally:
        os.close(top)
    try:
        os.rmdir(path)
    except OSError:
        pass  # The folder is not empty.
    os.unlink(path + ".json")


def _remove_tree_files(folder: int, path: bytes, removable: set[bytes]) -> None:
    """Remove files of a tree from an open folder, and folders that become empty; follow no links."""
    compiled = path.rpartition(b"/")[2] == b"__pycache__"
    for name in os.listdir(folder):
        raw = os.fsencode(name)
        below = path + b"/" + raw if path else raw
        try:
            if below in removable or (compiled and name.endswith(".pyc")):
                os.unlink(name, dir_fd=folder)
                continue
            inner = folders.open_folder(name, folder)
        except OSError:
            continue  # The entry is a link, or a file that must stay.
        try:
            if folders.identify_mount(inner) == folders.identify_mount(folder):
                _remove_tree_files(inner, below, removable)
        finally:
            os.close(inner)
        try:
            os.rmdir(name, dir_fd=folder)
        except OSError:
            pass  # The folder is not empty.


def _remove_part(part: str) -> None:
    folders.remove_folder_tree(part)
    if os.path.lexists(part + ".json"):
        os.unlink(part + ".json")
