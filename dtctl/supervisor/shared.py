"""A node's end of `job.shared`: files of checkpoints are listed, served to other nodes, and taken from them.

    RUN_DIR/work/PATH       a shared folder, in which the run's programs write
    RUN_DIR/ahead/PATH      the same on a spare, until the run has a working folder there (work.py)
    RUN_DIR/shared.json     what was copied to this node: path, size, time and the store that it came from
    RUN_DIR/.incoming-*     copies that are on their way
    RUN_DIR/aside-N         files that were set aside, since it is unknown whether they are complete
    WORKDIR/store           name of this node's disk, made by chance

No link is followed, nothing but regular files below the shared folders is read or written, and nothing is removed but
the version of a file that a newer one replaces. Stdlib only, Python 3.8.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
import zlib

from dtctl import folders
from dtctl.schema import InvalidMessage
from dtctl.supervisor import facts, frames, receive, relay, work
from dtctl.supervisor.messages.base import Message, by_op
from dtctl.supervisor.messages.setup import PushManifestEnd, PushRelay, PushState
from dtctl.supervisor.messages.shared import (
    FILES,
    KeepShared,
    ListShared,
    OfferShared,
    SendShared,
    SetAside,
    SharedCopy,
    SharedFile,
    SharedKept,
    SharedListed,
    SharedOffer,
    SharedOfferEnd,
    SharedRows,
    TakeShared,
)
from dtctl.supervisor.requests import CannotDo, NodeRequests
from dtctl.supervisor.setup import Reporting

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD = "shared.json"
STORE = "store"
INCOMING = ".incoming-"
ASIDE = "aside-"
ROW_BYTES = 200_000
"""Bytes of paths in one message, which has to fit into a frame."""
MARGIN_BYTES = 64 << 20
"""Bytes of the disk that stay free."""
SKIPPED = 20
"""Paths that are named as left out, at most."""
CHECKPOINT = re.compile(r"\.(pt|pth|ckpt|bin|safetensors|distcp|index|npz)$|^\.metadata$")
"""Names of files that are looked at where the spec names no shared folder."""
ZIP_END_BYTES = 66_000
"""Bytes at the end of a zip archive in which its directory's end stands (APPNOTE.TXT 4.3.16: a comment of 65,535)."""


class SharedRequests(NodeRequests):
    """Answers about the shared folders of one run."""

    KINDS = by_op(ListShared, OfferShared, SendShared, TakeShared, KeepShared, SetAside)
    IDLE_LIMIT_S = 86_400.0
    """Copies of other nodes may take hours; if the control machine goes away, the link closes."""

    def __init__(self, link: frames.FdLink, workdir: str) -> None:
        """See `NodeRequests`."""
        super().__init__(link, workdir)
        self.run_dir = ""
        self.rows: list[SharedFile] = []
        self.places: list[str] = []
        """Path of each row on this node."""
        self.offered: tuple[relay.BlockFiles, list[bytes]] | None = None
        self.incoming: Incoming | None = None

    def answer(self, request: Message) -> None:
        """Answer one request."""
        if isinstance(request, ListShared):
            self.run_dir = os.path.join(self.workdir, "runs", request.run)
            with Reporting(self.link):
                self.list_files(request.paths)
        elif isinstance(request, OfferShared):
            with Reporting(self.link):
                self.offer(request)
        elif isinstance(request, SendShared):
            self.send(request.blocks)
        elif isinstance(request, TakeShared):
            self.take(request)
        elif isinstance(request, KeepShared):
            with Reporting(self.link):
                kept = self.incoming.keep() if self.incoming is not None else SharedKept(files=0)
            self.drop_incoming()
            self.link.send_json(kept)
        elif isinstance(request, SetAside):
            self.link.send_json(self.set_aside(request.files))

    def close(self) -> None:
        """Stop serving, and remove files that have not got their final names."""
        receive.stop_serving()
        self.drop_incoming()

    def drop_incoming(self) -> None:
        """Remove copies that have no name yet."""
        if self.incoming is not None:
            self.incoming.close()
            self.incoming = None

    def list_files(self, paths: list[str]) -> None:
        """Send the rows of all files."""
        self.rows, self.places, self.offered = [], [], None
        receive.stop_serving()
        skipped: list[str] = []
        found = list(find_files(self.run_dir, paths, skipped) if paths else find_checkpoints(self.run_dir))
        records = {run_dir: read_record(run_dir) for run_dir in {home for _, _, home, _ in found}}
        batch, size = [], 0
        for path, place, home, info in found[:FILES]:
            known = records[home].get(path)
            is_copy = known is not None and known[:2] == [info.st_size, info.st_mtime_ns]
            row = SharedFile(
                path=path,
                size=info.st_size,
                mtime_ns=info.st_mtime_ns,
                age_s=time.time() - info.st_mtime,
                origin=str(known[2]) if is_copy and known is not None else "",
                end=check_end(place, info.st_size),
            )
            self.rows.append(row)
            self.places.append(place)
            batch.append(row)
            size += len(path) + 200
            if size > ROW_BYTES:
                self.link.send_json(SharedRows(rows=batch))
                batch, size = [], 0
        self.link.send_json(SharedRows(rows=batch))
        free = os.statvfs(self.workdir) if os.path.isdir(self.workdir) else None
        self.link.send_json(
            SharedListed(
                store=name_store(self.workdir),
                is_prepared=bool(work.folder_of(self.run_dir)),
                skipped=skipped[:SKIPPED],
                free_bytes=free.f_bavail * free.f_frsize if free is not None else 0,
            )
        )

    def offer(self, request: OfferShared) -> None:
        """Serve files of the last list."""
        receive.stop_serving()
        indexes, gone = list(dict.fromkeys(request.files)), []
        while True:
            blocks = cut_each([self.rows[index].size for index in indexes])
            digests, changed = self._digest(indexes, blocks)
            if not changed:
                break
            gone += sorted(changed)
            indexes = [index for index in indexes if index not in changed]
        root = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            places = [os.fsencode(self.places[index]) for index in indexes]
            store = relay.BlockFiles(root, places, blocks, digests, are_whole=True)
        finally:
            os.close(root)
        self.offered = store, digests
        folders.make_private(self.run_dir)
        exchange = receive.BlockReceiver(self.link)
        state, _ = exchange.serve(PushRelay(certificate=request.certificate, key=request.key), store, self.run_dir)
        self.link.send_json(SharedOffer(gone=gone, address=state.address, port=state.port))
        self.link.send_bytes(b"".join(digests))
        self.link.send_json(SharedOfferEnd())

    def _digest(self, indexes: list[int], blocks: list) -> tuple[list[bytes], set[int]]:  # type: ignore[type-arg]
        """Return the digests of blocks, and the files that are not as they were listed."""
        import hashlib

        changed = {index for index in indexes if not self._is_as_listed(index)}
        digests: list[bytes] = []
        for segments in blocks if not changed else ():
            total = hashlib.sha256()
            for number, offset, length in segments:
                try:
                    total.update(read_part(self.places[indexes[number]], offset, length))
                except OSError:
                    changed.add(indexes[number])
            digests.append(total.digest())
        return digests, changed | {index for index in indexes if not self._is_as_listed(index)}

    def _is_as_listed(self, index: int) -> bool:
        try:
            info = os.lstat(self.places[index])
        except OSError:
            return False
        row = self.rows[index]
        return stat.S_ISREG(info.st_mode) and (info.st_size, info.st_mtime_ns) == (row.size, row.mtime_ns)

    def send(self, blocks: list[int]) -> None:
        """Send blocks of the offer over this link."""
        if self.offered is None:
            raise CannotDo("protocol", "no files were offered")
        store, digests = self.offered
        for number in blocks:
            self.link.send_bytes(store.read(digests[number]))

    def take(self, request: TakeShared) -> None:
        """Fetch files into a folder of their own."""
        self.drop_incoming()
        run_dir = os.path.join(self.workdir, "runs", request.run)
        exchange = receive.BlockReceiver(self.link)
        try:
            inflate = zlib.decompressobj()
            packed = inflate.decompress(b"".join(exchange.pieces(PushManifestEnd.op)), receive.MAX_MANIFEST_BYTES)
            files = parse_copies(packed, request.paths)
            document = self.link.receive_json()
            order = PushRelay.parse(document or {})
            digests = b"".join(exchange.pieces(PushManifestEnd.op))
            folders.make_private(run_dir)
            with Reporting(self.link):
                self.incoming = Incoming(run_dir, request.paths, files, name_store(self.workdir))
            self.incoming.receive(exchange, order, digests, relay.Pace(request.share))
        except (receive.PushProblem, InvalidMessage, zlib.error, CannotDo) as exc:
            code = exc.code if isinstance(exc, (receive.PushProblem, CannotDo)) else "protocol"
            self.refuse(code, str(exc))
        except OSError as exc:
            self.refuse(facts.code_of(exc), facts.describe(exc))

    def refuse(self, code: str, text: str) -> None:
        """Report why files cannot be taken; the next list continues from there."""
        self.drop_incoming()
        self.link.send_json(PushState(state="error", code=code, message=text))

    def set_aside(self, indexes: list[int]) -> SharedKept:
        """Move files of the last list to a new folder in the run's own."""
        number = 0
        while os.path.lexists(os.path.join(self.run_dir, ASIDE + str(number))):
            number += 1
        aside = os.path.join(self.run_dir, ASIDE + str(number))
        moved, problem = 0, ""
        for index in indexes:
            target = os.path.join(aside, self.rows[index].path)
            try:
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                os.rename(self.places[index], target)
                moved += 1
            except OSError as exc:
                problem = f"{self.rows[index].path}: {exc.strerror}"
        for index in indexes:
            self._remove_empty(os.path.dirname(self.places[index]), self.rows[index].path)
        return SharedKept(files=moved, folder=aside, problem=problem)

    def _remove_empty(self, folder: str, path: str) -> None:
        """Remove folders that are empty now: by its name an empty `step-20` would be a checkpoint."""
        for _ in range(path.count("/") - 1):
            try:
                os.rmdir(folder)
            except OSError:
                return  # not empty
            folder = os.path.dirname(folder)


class Incoming:
    """Copies on their way to this node."""

    def __init__(self, run_dir: str, paths: list[str], files: list[SharedCopy], store: str) -> None:
        """Make room for files.

        Raises:
            CannotDo: there is none.
            OSError: they cannot be made.
        """
        self.run_dir, self.paths, self.files, self.store = run_dir, paths, files, store
        for name in os.listdir(run_dir):
            if name.startswith(INCOMING) and not os.path.exists("/proc/%s" % name.split("-")[1]):
                folders.remove_tree(os.path.join(run_dir, name))
        info = os.statvfs(run_dir)
        free, need = info.f_bavail * info.f_frsize - MARGIN_BYTES, sum(file.size for file in files)
        if need > free:
            raise CannotDo("disk-full", f"{need >> 20} MiB are to be copied, and {max(0, free) >> 20} MiB are free")
        self.folder = os.path.join(run_dir, "%s%d-%s" % (INCOMING, os.getpid(), os.urandom(4).hex()))
        os.mkdir(self.folder, 0o700)
        self.fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for number, file in enumerate(files):
            fd = folders.create_in(self.fd, str(number))
            os.truncate(fd, file.size)
            os.close(fd)

    def receive(self, exchange: receive.BlockReceiver, order: PushRelay, packed: bytes, pace: relay.Pace) -> None:
        """Fetch all blocks; they are served to other nodes, too, until the files get their names.

        Raises:
            PushProblem: what came is not what was announced.
        """
        blocks = cut_each([file.size for file in self.files])
        if len(packed) != 32 * len(blocks):
            raise receive.PushProblem("protocol", "the files are cut into other blocks")
        digests = [packed[start : start + 32] for start in range(0, len(packed), 32)]
        names = [str(number).encode() for number in range(len(self.files))]
        store = relay.BlockFiles(self.fd, names, blocks, digests)
        state, fetching = exchange.serve(order, store, self.folder)
        exchange.link.send_json(state)
        groups = sorted({file.group for file in self.files})
        for group in groups:
            of_group = [
                digest
                for digest, segments in zip(digests, blocks)  # noqa: B905 - Python 3.8 has no strict
                if self.files[segments[0][0]].group == group
            ]
            wanted = list(dict.fromkeys(digest for digest in of_group if not store.has(digest)))
            exchange.link.send_json(PushState(state="need", count=len(wanted)))
            if wanted:
                exchange.fetch(store, wanted, fetching, pace)
            exchange.link.send_json(PushState(state="done"))

    def keep(self) -> SharedKept:
        """Give the files their names, those of a new folder all at once."""
        receive.stop_serving()
        top = work.folder_of(self.run_dir) or os.path.join(self.run_dir, work.AHEAD)
        kept, problem = 0, ""
        new_folders: dict[str, str] = {}
        homes: dict[str, dict] = {}  # type: ignore[type-arg]
        for number, file in enumerate(self.files):
            source = os.path.join(self.folder, str(number))
            os.utime(source, ns=(file.mtime_ns, file.mtime_ns))
            try:
                root, home = find_root(self.run_dir, top, root_of(file.path, self.paths))
                inner = file.path[len(root_of(file.path, self.paths)) :].strip("/")
                target = self._target(root, inner, new_folders)
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                os.replace(source, target)
                record = homes.setdefault(home, read_record(home))
                record.pop(file.path, None)
                if file.origin != self.store:
                    record[file.path] = [file.size, file.mtime_ns, file.origin]
                kept += 1
            except OSError as exc:
                problem = f"{file.path}: {exc.strerror}"
        for home, record in homes.items():  # first, because an unrecorded copy would seem to be this node's own
            write_record(home, record)
        for folder, draft in new_folders.items():
            try:
                os.rename(draft, folder)
            except OSError as exc:
                problem = f"{folder}: {exc.strerror}"
        return SharedKept(files=kept, problem=problem)

    def _target(self, root: str, inner: str, new_folders: dict[str, str]) -> str:
        """Return where a file is moved to: its place, or a draft of the first folder above it that does not exist.

        Raises:
            OSError: a link, or a file, stands where a folder is needed.
        """
        parts = inner.split("/")
        folder = root
        os.makedirs(root, mode=0o700, exist_ok=True)
        for position, part in enumerate(parts[:-1]):
            folder = os.path.join(folder, part)
            if folder in new_folders or not os.path.lexists(folder):
                draft = os.path.join(self.folder, "new-%d" % len(new_folders))
                draft = new_folders.setdefault(folder, draft)
                return os.path.join(draft, *parts[position + 1 :])
            os.close(folders.open_folder(folder))
        return os.path.join(folder, parts[-1])

    def close(self) -> None:
        """Remove what has no name."""
        os.close(self.fd)
        folders.remove_tree(self.folder)


def cut_each(sizes: list[int]) -> list:  # type: ignore[type-arg]
    """Cut files into blocks as `relay.cut` does, but that no two share one: nodes lack different files."""
    return [
        [(number, offset, length) for _, offset, length in segments]
        for number, size in enumerate(sizes)
        for segments in relay.cut([size])
    ]


def name_store(workdir: str) -> str:
    """Return the name of this node's disk, which is made when it is first asked for."""
    folders.make_private(workdir)
    path = os.path.join(workdir, STORE)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        pass
    else:
        os.write(fd, os.urandom(16).hex().encode())
        os.close(fd)
    with open(folders.open_regular(path, follow=False), "rb") as file:
        return file.read(64).decode("ascii", "replace")


def read_record(run_dir: str) -> dict[str, list]:  # type: ignore[type-arg]
    """Return the copies that a run has on this node: path -> size, mtime in ns, and the store of the original."""
    try:
        with open(os.path.join(run_dir, RECORD), "rb") as file:
            record = json.loads(file.read().decode())
    except (OSError, ValueError):
        return {}
    return {path: row for path, row in record.items() if isinstance(row, list) and len(row) == 3}


def write_record(run_dir: str, record: dict) -> None:  # type: ignore[type-arg]
    """Write the record of copies, whole or not at all."""
    path = os.path.join(run_dir, RECORD)
    with open(path + ".partial", "wb") as file:
        file.write(json.dumps(record, separators=(",", ":")).encode())
    os.replace(path + ".partial", path)


def root_of(path: str, paths: list[str]) -> str:
    """Return the shared folder that a path lies in; empty without one."""
    return next((root for root in paths if path.startswith(root + "/")), "")


def find_root(run_dir: str, top: str, root: str) -> tuple[str, str]:
    """Return where a shared folder is, and the folder of the run that it belongs to: an earlier one's after a resume.

    Raises:
        OSError: it is a link to somewhere else.
    """
    place = os.path.realpath(os.path.join(top, root))
    if place == os.path.join(os.path.realpath(top), root):
        return place, run_dir
    home = place[: -len("/%s/%s" % (work.FOLDER, root))]
    is_of_run = os.path.dirname(home) == os.path.realpath(os.path.dirname(run_dir))
    if not is_of_run or place != os.path.join(home, work.FOLDER, root):
        raise OSError(40, "it is a link that leads out of the working folder", root)
    return place, home


def find_files(run_dir: str, paths: list[str], skipped: list[str]) -> Iterator:  # type: ignore[type-arg]
    """Yield each regular file below shared folders: path, place, folder of its run, and the result of `lstat`.

    Args:
        run_dir: folder of the run.
        paths: shared folders, relative to the working folder.
        skipped: what is left out is put there, with the reason.
    """
    top = work.folder_of(run_dir) or os.path.join(run_dir, work.AHEAD)
    for root in paths:
        try:
            place, home = find_root(run_dir, top, root)
        except OSError as exc:
            skipped.append(f"{root}: {exc.strerror}")
            continue
        yield from _walk(place, root, home, skipped)


def _walk(place: str, path: str, home: str, skipped: list[str]) -> Iterator:  # type: ignore[type-arg]
    try:
        with os.scandir(place) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError:
        return  # there is none yet, or it has gone
    for name in names:
        inner, below = os.path.join(place, name), path + "/" + name
        try:
            info = os.lstat(inner)
        except OSError:
            continue  # it has gone
        if not folders.is_name(name) or len(below) > 4000:
            skipped.append(f"{path}: a name that cannot be passed on")
        elif stat.S_ISDIR(info.st_mode):
            yield from _walk(inner, below, home, skipped)
        elif stat.S_ISREG(info.st_mode):
            yield below, inner, home, info
        else:
            skipped.append(f"{below}: {'a link' if stat.S_ISLNK(info.st_mode) else 'no regular file'}")


def find_checkpoints(run_dir: str) -> Iterator:  # type: ignore[type-arg]
    """Yield files of the working folder that have names of checkpoints, and were written by the run's programs."""
    top = os.path.join(run_dir, work.FOLDER)
    outputs = [
        name for name in (os.listdir(top) if os.path.isdir(top) else ()) if os.path.islink(os.path.join(top, name))
    ]
    for paths in ([], outputs) if outputs else ([],):
        for path, _, _ in work.written(run_dir, paths):
            place = os.path.join(top, path)
            name = path.rpartition("/")[2]
            if CHECKPOINT.search(name) and all(map(folders.is_name, path.split("/"))):
                try:
                    yield path, place, run_dir, os.lstat(place)
                except OSError:
                    continue  # it has gone


def check_end(place: str, size: int) -> str:
    """Return `whole` or `cut` for a file whose format shows its end, empty for any other; nothing is unpickled.

    torch.save writes a zip archive, whose directory comes last. A file of safetensors begins with the length of a
    header, which has the offset of each tensor's end (https://github.com/huggingface/safetensors, Format).
    """
    name = place.rpartition("/")[2]
    if name.endswith(".distcp"):
        return ""  # several archives in one file; another file marks it as complete
    try:
        head = read_part(place, 0, min(8, size))
        if head[:4] == b"PK\x03\x04":
            tail = read_part(place, max(0, size - ZIP_END_BYTES), min(size, ZIP_END_BYTES))
            return "whole" if b"PK\x05\x06" in tail else "cut"
        if name.endswith(".safetensors"):
            length = int.from_bytes(head, "little")
            if size < 8 + length or length > 100 << 20:
                return "cut"
            header = json.loads(read_part(place, 8, length).decode())
            end = max((row["data_offsets"][1] for key, row in header.items() if key != "__metadata__"), default=0)
            return "whole" if size == 8 + length + end else "cut"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    return "cut" if size == 0 and CHECKPOINT.search(name) else ""


def read_part(place: str, offset: int, length: int) -> bytes:
    """Return a part of a regular file.

    Raises:
        OSError: it cannot be read, or is shorter.
    """
    fd = folders.open_regular(place, follow=False)
    try:
        parts, done = [], 0
        while done < length:
            data = os.pread(fd, length - done, offset + done)
            if not data:
                raise OSError(5, "it is shorter than it was", place)
            parts.append(data)
            done += len(data)
    finally:
        os.close(fd)
    return b"".join(parts)


def parse_copies(packed: bytes, paths: list[str]) -> list[SharedCopy]:
    """Return the files that are to be taken; refused unless each lies below one of the shared folders.

    Raises:
        PushProblem: one does not, or is named twice.
        InvalidMessage: it is no list of files.
    """
    try:
        rows = json.loads(packed.decode())
    except (ValueError, RecursionError) as exc:
        raise InvalidMessage("no list of files: %s" % exc) from exc
    if not isinstance(rows, list) or len(rows) > FILES:
        raise InvalidMessage("no list of files")
    files = [SharedCopy.parse(row) for row in rows]
    known = set()
    for file in files:
        parts = file.path.split("/")
        if not all(map(folders.is_name, parts)) or not root_of(file.path, paths) or file.path in known:
            raise receive.PushProblem("escape", "%r is no path in a shared folder, or is named twice" % file.path)
        known.add(file.path)
    return files
