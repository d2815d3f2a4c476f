"""The node's end of a push: keeps trees of files below the workdir, takes only what is missing, checks every digest.

    WORKDIR/code/TREE          the files of one tree; several runs may use it, so nobody changes it
    WORKDIR/code/TREE.json     what was written there, and what `lstat` said of it then: the seal
    WORKDIR/code/TREE.lock     held shared by every run that uses the tree

A tree that matches its seal is taken as it is. When somebody has changed it, another folder (TREE.1, ...) is made
beside it, from what is still good there and what is sent. Nothing the sender says is trusted: neither paths, nor sizes,
nor links. Stdlib only, Python 3.8.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import zlib

from dtctl.supervisor import facts, frames

LINK_MODE = 0o120000
KEPT_TREES = 3
MAX_MANIFEST_BYTES = 256 << 20
CHUNK = 1 << 18

_held: list[int] = []
"""Locks of the trees in use, open for as long as this process and its children live."""


class Refused(Exception):
    """The push cannot be taken; the sender has been told."""


class _Problem(Exception):
    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def receive(link: frames.FdLink, request: dict) -> str:  # type: ignore[type-arg]  # typing is slow to import on a node
    """Bring the tree that `request` names to this node; the folder it lies in.

    Raises:
        Refused: it could not be done. Nothing half-written is left, and the sender knows why.
    """
    store = os.path.join(request["workdir"], "code")
    try:
        os.makedirs(store, mode=0o700, exist_ok=True)
        return _Push(link, store, _checked_name(request["tree"])).run()
    except _Problem as exc:
        code, text = exc.code, str(exc)
    except OSError as exc:
        code, text = facts.code_of(exc), facts.describe(exc)
    except zlib.error as exc:
        code, text = "digest", f"the stream is damaged: {exc}"
    link.send_json({"op": "push", "state": "error", "code": code, "message": text})
    raise Refused(text)


def _checked_name(tree: object) -> str:
    if isinstance(tree, str) and len(tree) == 32 and all(character in "0123456789abcdef" for character in tree):
        return tree
    raise _Problem("escape", f"{tree!r} is not the digest of a tree")


class _Push:
    """One push to one store."""

    def __init__(self, link: frames.FdLink, store: str, tree: str) -> None:
        self.link = link
        self.store = store
        self.tree = tree
        self.part = os.path.join(store, f".part-{os.getpid()}")

    def run(self) -> str:
        """The dialogue, from the sender's request to the folder's name."""
        _remove_stale(self.store)
        for name in self._copies():
            path = os.path.join(self.store, name)
            seal = _read_seal(path)
            if seal is not None and not _changed(path, seal):
                return self._use(path, {"op": "push", "state": "have", "path": path})
        self.link.send_json({"op": "push", "state": "want-manifest"})
        files = _parse_manifest(self._take_until("push-manifest-end", MAX_MANIFEST_BYTES), self.tree)
        good = self._good_files()
        need = _indexes_to_send(files, good)
        self.link.send_json({"op": "push", "state": "need", "ranges": _ranges(need)})
        try:
            self._write(files, need, good)
            path = self._publish(files)
        finally:
            _remove(self.part)
        size = sum(row[2] for row in files)
        done = {"op": "push", "state": "done", "path": path, "digest": self.tree, "files": len(files), "bytes": size}
        return self._use(path, done)

    def _copies(self) -> list[str]:
        """Folders of this tree, the newest first."""
        names = [name for name in os.listdir(self.store) if name.partition(".")[0] == self.tree]
        return sorted((name for name in names if name.partition(".")[2].isdigit() or name == self.tree), reverse=True)

    def _use(self, path: str, answer: dict) -> str:  # type: ignore[type-arg]
        """Keep the tree from being pruned while this process lives, and prune others."""
        fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        _held.append(fd)
        os.utime(path + ".json")
        _prune(self.store, os.path.basename(path))
        self.link.send_json(answer)
        return path

    def _good_files(self) -> dict[str, str]:
        """Digest -> path of files in other trees that still match their seals."""
        good = {}
        for name in _sealed(self.store)[:KEPT_TREES]:
            path = os.path.join(self.store, name)
            seal = _read_seal(path) or []
            bad = set(_changed(path, seal))
            for row in seal:
                if row[0] not in bad and row[1] != LINK_MODE:
                    good[row[3]] = os.path.join(path, _fs(row[0]))
        return good

    def _take_until(self, end: str, limit: int) -> bytes:
        """The decompressed contents of BYTES frames up to the message `end`."""
        inflate = zlib.decompressobj()
        data = bytearray()
        for piece in self._pieces(end):
            data += inflate.decompress(piece, limit + 1 - len(data))
            if len(data) > limit:
                raise _Problem("escape", "the manifest is larger than it may be")
        return bytes(data)

    def _pieces(self, end: str):  # type: ignore[no-untyped-def]
        while True:
            frame = self.link.receive()
            if frame is None:
                raise _Problem("protocol", "the sender has gone")
            kind, _, payload = frame
            if kind == frames.BYTES:
                yield payload
            elif frames.decode(payload).get("op") == end:
                return
            else:
                raise _Problem("protocol", f"expected file contents, got {payload[:80]!r}")

    def _write(self, files: list, need: list[int], good: dict[str, str]) -> None:  # type: ignore[type-arg]
        os.mkdir(self.part, 0o700)
        made = {""}
        for row in files:
            folder = row[0].rpartition("/")[0]
            if folder not in made:
                os.makedirs(os.path.join(self.part, _fs(folder)), mode=0o700, exist_ok=True)
                made.add(folder)
        received = self._receive_contents(files, need)
        written = set(need)
        for index, row in enumerate(files):
            path = os.path.join(self.part, _fs(row[0]))
            if row[1] == LINK_MODE or index in written:
                continue
            source = received.get(row[3]) or good.get(row[3])
            if source is None:
                raise _Problem("protocol", f"nobody has sent {row[0]!r}")
            _copy(source, path, row[1], row[3])
        for row in files:  # last, so that no file is ever written through a link
            if row[1] == LINK_MODE:
                os.symlink(_fs(row[4]), os.path.join(self.part, _fs(row[0])))

    def _receive_contents(self, files: list, need: list[int]) -> dict[str, str]:  # type: ignore[type-arg]
        """Write what is sent, file after file; digest -> path."""
        import hashlib

        received: dict[str, str] = {}
        inflate = zlib.decompressobj()
        data = memoryview(b"")
        pieces = self._pieces("push-end")

        def take(size: int) -> memoryview:
            nonlocal data
            while not data:
                rest = inflate.unconsumed_tail
                piece = rest or next(pieces, None)
                if piece is None:
                    raise _Problem("digest", "the stream ended before the last file")
                data = memoryview(inflate.decompress(piece, CHUNK))
            taken, data = data[:size], data[size:]
            return taken

        for index in need:
            name, mode, size, digest = files[index][:4]
            path = os.path.join(self.part, _fs(name))
            total = hashlib.sha256()
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            try:
                while size:
                    piece = take(size)
                    total.update(piece)
                    size -= len(piece)
                    while piece:
                        piece = piece[os.write(fd, piece) :]
            finally:
                os.close(fd)
            if total.hexdigest() != digest:
                raise _Problem("digest", f"{name!r} arrived with other contents than announced")
            received[digest] = path
        for piece in pieces:
            if inflate.decompress(piece, 1):
                raise _Problem("escape", "more was sent than announced")
        return received

    def _publish(self, files: list) -> str:  # type: ignore[type-arg]
        """Seal the folder and give it its name."""
        rows = []
        for row in files:
            info = os.lstat(os.path.join(self.part, _fs(row[0])))
            rows.append([*row, info.st_mtime_ns, info.st_ctime_ns, info.st_ino])
        seal = self.part + ".json"
        with open(seal, "w") as file:
            json.dump({"files": rows}, file, separators=(",", ":"))
        number = 0
        while True:
            path = os.path.join(self.store, self.tree + (f".{number}" if number else ""))
            try:
                os.rename(self.part, path)
            except OSError as exc:
                if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                number += 1  # somebody else's, or one that was tampered with
                continue
            os.rename(seal, path + ".json")
            return path


def _parse_manifest(data: bytes, tree: str) -> list:  # type: ignore[type-arg]
    """Rows of [path, mode, size, digest, link], paths as latin-1 text; refused unless every one is harmless."""
    import hashlib

    try:
        rows = json.loads(data)
    except ValueError as exc:
        raise _Problem("protocol", f"the manifest is not JSON: {exc}") from exc
    total = hashlib.sha256()
    seen = set()
    links = {row[0] for row in rows if row[1] == LINK_MODE}
    for path, mode, size, digest, link in rows:
        parts = path.split("/")
        if not path or "\0" in path or any(part in ("", ".", "..") for part in parts) or path in seen:
            raise _Problem("escape", f"{path!r} is not a path inside the tree")
        if any("/".join(parts[:end]) in links for end in range(1, len(parts))):
            raise _Problem("escape", f"{path!r} leads through a link")
        if mode not in (0o600, 0o700, LINK_MODE) or not isinstance(size, int) or size < 0:
            raise _Problem("protocol", f"{path!r} has an impossible mode or size")
        if mode == LINK_MODE and _leaves(path, link):
            raise _Problem("escape", f"the link {path!r} leads out of the tree")
        seen.add(path)
        name = path.encode("latin-1")
        total.update(b"%d\0%o\0%s\0%s\0" % (len(name), mode, name, digest.encode()))
    if any(parent in seen for path in seen for parent in _parents(path)):
        raise _Problem("escape", "a file is also a folder")
    if total.hexdigest()[:32] != tree:
        raise _Problem("digest", "the manifest is not that of the tree")
    return list(rows)


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _leaves(path: str, link: str) -> bool:
    """Whether a link at `path` leads out of the tree, going by its text alone."""
    if not link or link.startswith("/") or "\0" in link:
        return True
    depth = path.count("/")
    for part in link.split("/"):
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            return True
    return False


def _fs(path: str) -> str:
    """A path from JSON, where bytes are written as latin-1, as the file system spells it."""
    return os.fsdecode(path.encode("latin-1"))


def _indexes_to_send(files: list, good: dict[str, str]) -> list[int]:  # type: ignore[type-arg]
    """Which contents are missing, each once."""
    need = {}
    for index, row in enumerate(files):
        if row[1] != LINK_MODE and row[3] not in good and row[3] not in need:
            need[row[3]] = index
    return sorted(need.values())


def _ranges(indexes: list[int]) -> list[list[int]]:
    """[1, 2, 3, 7] as [[1, 4], [7, 8]]: short when, as at a first push, all are needed."""
    ranges: list[list[int]] = []
    for index in indexes:
        if ranges and ranges[-1][1] == index:
            ranges[-1][1] = index + 1
        else:
            ranges.append([index, index + 1])
    return ranges


def _copy(source: str, path: str, mode: int, digest: str) -> None:
    import hashlib

    total = hashlib.sha256()
    with open(source, "rb", buffering=0) as old:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(fd, "wb", buffering=0) as new:
            for data in iter(lambda: old.read(CHUNK), b""):
                total.update(data)
                new.write(data)
    if total.hexdigest() != digest:
        raise _Problem("digest", f"{source} is damaged on this node's disk")


def _read_seal(path: str) -> list | None:  # type: ignore[type-arg]
    try:
        with open(path + ".json") as file:
            return list(json.load(file)["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _changed(path: str, seal: list) -> list[str]:  # type: ignore[type-arg]
    """Files of a tree that are not as they were written; what was added since does not count."""
    changed = []
    for name, _, _, _, _, mtime_ns, ctime_ns, inode in seal:
        try:
            info = os.lstat(os.path.join(path, _fs(name)))
        except OSError:
            changed.append(name)
            continue
        if (info.st_mtime_ns, info.st_ctime_ns, info.st_ino) != (mtime_ns, ctime_ns, inode):
            changed.append(name)
    return changed


def _sealed(store: str) -> list[str]:
    """Names of sealed trees, the most recently used first."""
    names = [name[:-5] for name in os.listdir(store) if name.endswith(".json") and not name.startswith(".")]
    return sorted(names, key=lambda name: -os.stat(os.path.join(store, name + ".json")).st_mtime_ns)


def _prune(store: str, current: str) -> None:
    """Remove old trees that no run uses."""
    for name in _sealed(store)[KEPT_TREES:]:
        path = os.path.join(store, name)
        if name == current:
            continue
        fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # a run uses it
        else:
            for leftover in (path + ".json", path, path + ".lock"):
                _remove(leftover)
        finally:
            os.close(fd)


def _remove_stale(store: str) -> None:
    """Remove what pushes have left that were killed."""
    for name in os.listdir(store):
        if name.startswith(".part-"):
            owner = name[6:].partition(".")[0]
            if not (owner.isdigit() and os.path.exists(f"/proc/{owner}")):
                _remove(os.path.join(store, name))


def _remove(path: str) -> None:
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        import shutil

        shutil.rmtree(path, ignore_errors=True)


def leads_out(path: bytes, link: bytes) -> bool:
    """Whether a link at `path` leads out of the tree, going by its text alone."""
    return _leaves(path.decode("latin-1"), link.decode("latin-1"))
