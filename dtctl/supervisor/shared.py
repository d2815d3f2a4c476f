"""A node's end of `job.shared`: it lists files of checkpoints, serves them to other nodes, and fetches them.

    RUN_DIR/work/PATH       a shared folder, in which the run's programs write
    RUN_DIR/ahead/PATH      the same on a spare, until the run has a working folder there (run_workdir.py)
    RUN_DIR/shared.json     versions of files that were copied to this node, or from it: see `read_copy_record`
    RUN_DIR/.incoming-*     incomplete copies
    RUN_DIR/aside-N         files that were set aside because they may be incomplete
    WORKDIR/store           random name of this node's disk

No link is followed, only regular files below the shared folders are read or written, and only copies are removed: those
of a version that a newer one replaces, and those of a file that its writer's node has removed.
Stdlib only, Python 3.8.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
import zlib

from dtctl import folders, node_facts
from dtctl.schema import InvalidMessage
from dtctl.supervisor import facts, frames, receive, relay, run_workdir
from dtctl.supervisor.messages.base import Message, index_message_types
from dtctl.supervisor.messages.setup import PushManifestEnd, PushRelay, PushState
from dtctl.supervisor.messages.shared import (
    FILES,
    ROWS,
    CommitShared,
    FetchShared,
    ListShared,
    OfferShared,
    QuarantineShared,
    RemoveShared,
    SendShared,
    SharedCommitted,
    SharedCopy,
    SharedFile,
    SharedListed,
    SharedOffer,
    SharedOfferEnd,
    SharedRows,
)
from dtctl.supervisor.requests import NodeRequests, RequestFailed
from dtctl.supervisor.setup import WorkReporter

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD = "shared.json"
STORE = "store"
INCOMING = ".incoming-"
ASIDE = "aside-"
ROW_BYTES = 200_000
"""Most bytes of paths in one message, which has to fit into a frame."""
MARGIN_BYTES = 64 << 20
"""Bytes of the disk that stay free."""
SKIPPED = 20
"""Most left-out paths that are reported."""
CHECKPOINT = re.compile(r"\.(pt|pth|ckpt|bin|safetensors|distcp|index|npz)$|^\.metadata$")
"""Names of files that count as checkpoints if the spec names no shared folder, in addition to files of torch.save."""
ZIP_START = b"PK\x03\x04"
TORCH_MEMBER = b"/data.pkl"
"""End of the name of the first member in an archive of torch.save (torch/serialization.py, `_save`)."""
ZIP_END_BYTES = 66_000
"""Bytes at the end of a zip archive that contain the end of its directory (APPNOTE.TXT 4.3.16: comment of 65,535)."""


class SharedRequests(NodeRequests):
    """Answers about the shared folders of one run."""

    KINDS = index_message_types(
        ListShared, OfferShared, SendShared, FetchShared, CommitShared, QuarantineShared, RemoveShared
    )
    IDLE_LIMIT_S = 86_400.0
    """Seconds of silence: copies of other nodes may take hours, and the link closes if the control machine is gone."""

    def __init__(self, link: frames.FdLink, workdir: str) -> None:
        """Prepare to answer, see `NodeRequests`."""
        super().__init__(link, workdir)
        self.run_dir = ""
        self.rows: list[SharedFile] = []
        self.places: list[str] = []
        """Path of each row on this node."""
        self.homes: list[str] = []
        """Folder of the run that contains each row: this run or an earlier one."""
        self.offered: tuple[relay.BlockFiles, list[bytes]] | None = None
        self.incoming: IncomingCopies | None = None

    def answer(self, request: Message) -> None:
        """Carry out a request, and send the answer."""
        if isinstance(request, ListShared):
            self.run_dir = os.path.join(self.workdir, "runs", request.run)
            with WorkReporter(self.link):
                self.list_files(request.paths)
        elif isinstance(request, OfferShared):
            with WorkReporter(self.link):
                self.offer(request)
        elif isinstance(request, SendShared):
            self.send(request.blocks)
        elif isinstance(request, FetchShared):
            self.fetch_shared_files(request)
        elif isinstance(request, CommitShared):
            with WorkReporter(self.link):
                kept = self.incoming.keep() if self.incoming is not None else SharedCommitted(files=0)
            self.drop_incoming()
            self.link.send_json(kept)
        elif isinstance(request, QuarantineShared):
            self.link.send_json(self.set_aside(request.files))
        elif isinstance(request, RemoveShared):
            with WorkReporter(self.link):
                done = self.remove_copies(request.files)
            self.link.send_json(done)

    def close(self) -> None:
        """Stop serving, and remove files that have not got their final names."""
        receive.stop_serving()
        self.drop_incoming()

    def drop_incoming(self) -> None:
        """Remove copies that have not got their final names."""
        if self.incoming is not None:
            self.incoming.close()
            self.incoming = None

    def list_files(self, paths: list[str]) -> None:
        """Send the rows of all files."""
        self.rows, self.places, self.homes, self.offered = [], [], [], None
        receive.stop_serving()
        skipped: list[str] = []
        found = list(find_shared_files(self.run_dir, paths, skipped) if paths else find_checkpoints(self.run_dir))
        records = {run_dir: read_copy_record(run_dir) for run_dir in {home for _, _, home, _ in found}}
        batch, size = [], 0
        for path, place, home, info in found[:FILES]:
            known = records[home].get(path)
            row = SharedFile(
                path=path,
                size=info.st_size,
                mtime_ns=info.st_mtime_ns,
                age_s=time.time() - info.st_mtime,
                origin=str(known[2]) if known is not None and known[:2] == [info.st_size, info.st_mtime_ns] else "",
                end=check_end(place, info.st_size),
            )
            self.rows.append(row)
            self.places.append(place)
            self.homes.append(home)
            batch.append(row)
            size += len(path) + 200
            if size > ROW_BYTES:
                self.link.send_json(SharedRows(rows=batch))
                batch, size = [], 0
        self.link.send_json(SharedRows(rows=batch))
        for part in _cut_paths(find_removed_files(self.run_dir, paths)):
            self.link.send_json(SharedRows(rows=[], removed=part))
        free = os.statvfs(self.workdir) if os.path.isdir(self.workdir) else None
        self.link.send_json(
            SharedListed(
                store=name_store(self.workdir),
                is_prepared=bool(run_workdir.find_working_folder(self.run_dir)),
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
            digests, changed = self._digest_listed_blocks(indexes, blocks)
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
        self._record_own_files(indexes)
        folders.make_private(self.run_dir)
        exchange = receive.BlockReceiver(self.link)
        state, _ = exchange.serve(PushRelay(certificate=request.certificate, key=request.key), store, self.run_dir)
        self.link.send_json(SharedOffer(gone=gone, address=state.address, port=state.port, code=state.code))
        self.link.send_bytes(b"".join(digests))
        self.link.send_json(SharedOfferEnd())

    def _record_own_files(self, indexes: list[int]) -> None:
        """Record files of this node before others fetch them, so that a later removal by the program is detected."""
        own = [index for index in indexes if not self.rows[index].origin]
        for home in {self.homes[index] for index in own}:
            record = read_copy_record(home)
            before = dict(record)
            for index in own:
                if self.homes[index] == home:
                    row = self.rows[index]
                    record[row.path] = [row.size, row.mtime_ns, "", node_facts.read_boot_id()]
            if record != before:
                write_copy_record(home, record)

    def _digest_listed_blocks(self, indexes: list[int], blocks: list) -> tuple[list[bytes], set[int]]:  # type: ignore[type-arg]
        """Return the digests of blocks, and the indexes of files that have changed since the list."""
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
            raise RequestFailed("protocol", "no files were offered")
        store, digests = self.offered
        for number in blocks:
            self.link.send_bytes(store.read(digests[number]))

    def fetch_shared_files(self, request: FetchShared) -> None:
        """Fetch files into a separate folder."""
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
            with WorkReporter(self.link):
                self.incoming = IncomingCopies(run_dir, request.paths, files, name_store(self.workdir))
            self.incoming.receive(exchange, order, digests, relay.RateLimiter(request.share))
        except (receive.PushProblem, InvalidMessage, zlib.error, RequestFailed) as exc:
            code = exc.code if isinstance(exc, (receive.PushProblem, RequestFailed)) else "protocol"
            self.report_refusal(code, str(exc))
        except OSError as exc:
            self.report_refusal(facts.choose_hint_code(exc), facts.describe_os_error(exc))

    def report_refusal(self, code: str, text: str) -> None:
        """Report the reason why files cannot be fetched, and drop the incomplete copies."""
        self.drop_incoming()
        self.link.send_json(PushState(state="error", code=code, message=text))

    def set_aside(self, indexes: list[int]) -> SharedCommitted:
        """Move files of the last list to a new folder in the run's folder."""
        number = 0
        while os.path.lexists(os.path.join(self.run_dir, ASIDE + str(number))):
            number += 1
        aside = os.path.join(self.run_dir, ASIDE + str(number))
        moved, problem = 0, ""
        self._forget_files(indexes)
        for index in indexes:
            target = os.path.join(aside, self.rows[index].path)
            try:
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                os.rename(self.places[index], target)
                moved += 1
            except OSError as exc:
                problem = f"{self.rows[index].path}: {exc.strerror}"
        for index in indexes:
            _remove_empty_folders(os.path.dirname(self.places[index]), self.rows[index].path)
        return SharedCommitted(files=moved, folder=aside, problem=problem)

    def _forget_files(self, indexes: list[int]) -> None:
        """Remove files from the records, since a recorded file that is missing counts as removed by the program."""
        for home in {self.homes[index] for index in indexes}:
            record = read_copy_record(home)
            for index in indexes:
                record.pop(self.rows[index].path, None)
            write_copy_record(home, record)

    def remove_copies(self, indexes: list[int]) -> SharedCommitted:
        """Remove files of the last list that were copied to this node and have not been changed since."""
        removed, problem = 0, ""
        copies = [index for index in indexes if self.rows[index].origin and self._is_as_listed(index)]
        for index in copies:
            try:
                os.unlink(self.places[index])
                removed += 1
            except OSError as exc:
                problem = f"{self.rows[index].path}: {exc.strerror}"
        self._forget_files(copies)
        for index in copies:
            _remove_empty_folders(os.path.dirname(self.places[index]), self.rows[index].path)
        return SharedCommitted(files=removed, problem=problem)


def _remove_empty_folders(folder: str, path: str) -> None:
    """Remove folders that have become empty, since an empty `step-20` would look like a checkpoint."""
    for _ in range(path.count("/") - 1):
        try:
            os.rmdir(folder)
        except OSError:
            return  # The folder is not empty.
        folder = os.path.dirname(folder)


class IncomingCopies:
    """Incomplete copies that this node fetches."""

    def __init__(self, run_dir: str, paths: list[str], files: list[SharedCopy], store: str) -> None:
        """Create the files with their sizes.

        Raises:
            RequestFailed: the disk has too little space.
            OSError: the files cannot be created.
        """
        self.run_dir, self.paths, self.files, self.store = run_dir, paths, files, store
        for name in os.listdir(run_dir):
            if name.startswith(INCOMING) and not os.path.exists("/proc/%s" % name.split("-")[1]):
                folders.remove_folder_tree(os.path.join(run_dir, name))
        info = os.statvfs(run_dir)
        free, need = info.f_bavail * info.f_frsize - MARGIN_BYTES, sum(file.size for file in files)
        if need > free:
            raise RequestFailed(
                "disk-full", f"{need >> 20} MiB are to be copied, and {max(0, free) >> 20} MiB are free"
            )
        self.folder = os.path.join(run_dir, "%s%d-%s" % (INCOMING, os.getpid(), os.urandom(4).hex()))
        os.mkdir(self.folder, 0o700)
        self.fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for number, file in enumerate(files):
            fd = folders.create_in(self.fd, str(number))
            os.truncate(fd, file.size)
            os.close(fd)

    def receive(
        self, exchange: receive.BlockReceiver, order: PushRelay, packed: bytes, pace: relay.RateLimiter
    ) -> None:
        """Fetch all blocks, and serve them to other nodes until the files get their final names.

        Raises:
            PushProblem: the received data differ from the announced data.
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

    def keep(self) -> SharedCommitted:
        """Give the files their final names; a new folder appears with all of its files in one step."""
        receive.stop_serving()
        top = run_workdir.find_working_folder(self.run_dir) or os.path.join(self.run_dir, run_workdir.AHEAD)
        kept, problem = 0, ""
        new_folders: dict[str, str] = {}
        homes: dict[str, dict] = {}  # type: ignore[type-arg]
        for number, file in enumerate(self.files):
            source = os.path.join(self.folder, str(number))
            os.utime(source, ns=(file.mtime_ns, file.mtime_ns))
            try:
                root, home = find_root(self.run_dir, top, find_shared_root(file.path, self.paths))
                inner = file.path[len(find_shared_root(file.path, self.paths)) :].strip("/")
                target = self._choose_file_target(root, inner, new_folders)
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                os.replace(source, target)
                record = homes.setdefault(home, read_copy_record(home))
                record.pop(file.path, None)
                if file.origin != self.store:
                    record[file.path] = [file.size, file.mtime_ns, file.origin]
                kept += 1
            except OSError as exc:
                problem = f"{file.path}: {exc.strerror}"
        # The records come first, because an unrecorded copy would look like a file of this node.
        for home, record in homes.items():
            write_copy_record(home, record)
        for folder, draft in new_folders.items():
            try:
                os.rename(draft, folder)
            except OSError as exc:
                problem = f"{folder}: {exc.strerror}"
        return SharedCommitted(files=kept, problem=problem)

    def _choose_file_target(self, root: str, inner: str, new_folders: dict[str, str]) -> str:
        """Return the target of a file: its final path, or one in a draft of the first missing folder above it.

        Raises:
            OSError: there is a link or a file in the place of a folder.
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
        """Remove copies without a final name."""
        os.close(self.fd)
        folders.remove_folder_tree(self.folder)


def cut_each(sizes: list[int]) -> list:  # type: ignore[type-arg]
    """Cut files into blocks like `relay.split_file_blocks`, but so that no two files share a block.

    This is needed because nodes lack different files.
    """
    return [
        [(number, offset, length) for _, offset, length in segments]
        for number, size in enumerate(sizes)
        for segments in relay.split_file_blocks([size])
    ]


def name_store(workdir: str) -> str:
    """Return the name of this node's disk, which is made at the first call."""
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


def read_copy_record(run_dir: str) -> dict[str, list]:  # type: ignore[type-arg]
    """Return the versions of files that were copied to this node for a run, or from it, by path.

    A version is size, mtime in ns, and store of the node that wrote the file. For a file of this node, the store is
    empty, and the id of the boot follows in which the row was written, since a loss of power may lose files, too.
    """
    try:
        with open(os.path.join(run_dir, RECORD), "rb") as file:
            record = json.loads(file.read().decode())
    except (OSError, ValueError):
        return {}
    return {path: row for path, row in record.items() if isinstance(row, list) and len(row) in (3, 4)}


def write_copy_record(run_dir: str, record: dict) -> None:  # type: ignore[type-arg]
    """Replace the record of copies in one step."""
    path = os.path.join(run_dir, RECORD)
    with open(path + ".partial", "wb") as file:
        file.write(json.dumps(record, separators=(",", ":")).encode())
    os.replace(path + ".partial", path)


def find_shared_root(path: str, paths: list[str]) -> str:
    """Return the shared folder that contains a path; empty without one."""
    return next((root for root in paths if path.startswith(root + "/")), "")


def find_root(run_dir: str, top: str, root: str) -> tuple[str, str]:
    """Return the path of a shared folder and the folder of its run, which after a resume may be an earlier run.

    Raises:
        OSError: the shared folder is a link out of the working folder.
    """
    place = os.path.realpath(os.path.join(top, root))
    if place == os.path.join(os.path.realpath(top), root):
        return place, run_dir
    home = place[: -len("/%s/%s" % (run_workdir.FOLDER, root))]
    is_of_run = os.path.dirname(home) == os.path.realpath(os.path.dirname(run_dir))
    if not is_of_run or place != os.path.join(home, run_workdir.FOLDER, root):
        raise OSError(40, "it is a link that leads out of the working folder", root)
    return place, home


def find_shared_files(run_dir: str, paths: list[str], skipped: list[str]) -> Iterator:  # type: ignore[type-arg]
    """Yield each regular file below shared folders: path, place, folder of its run, and the result of `lstat`.

    Args:
        run_dir: folder of the run.
        paths: shared folders, relative to the working folder.
        skipped: list to which the left-out paths are added, with the reasons.
    """
    top = run_workdir.find_working_folder(run_dir) or os.path.join(run_dir, run_workdir.AHEAD)
    for root in paths:
        try:
            place, home = find_root(run_dir, top, root)
        except OSError as exc:
            skipped.append(f"{root}: {exc.strerror}")
            continue
        yield from _walk_shared_folder(place, root, home, skipped)


def find_removed_files(run_dir: str, paths: list[str]) -> Iterator[str]:
    """Yield files below shared folders that were written here, copied to other nodes, and removed here since.

    No file is yielded if the reason of its removal is unknown: after another boot, or without the working folder.
    """
    top, boot = run_workdir.find_working_folder(run_dir), node_facts.read_boot_id()
    for root in paths if top else ():
        try:
            place, home = find_root(run_dir, top, root)
        except OSError:
            continue
        if not os.path.isdir(os.path.join(home, run_workdir.FOLDER)):
            continue
        for path, known in read_copy_record(home).items():
            if find_shared_root(path, [root]) and known[2:] == ["", boot]:
                try:
                    os.lstat(place + path[len(root) :])
                except (FileNotFoundError, NotADirectoryError):
                    yield path
                except OSError:
                    continue  # The file cannot be checked.


def _cut_paths(paths: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of paths, each of which fits into a message."""
    part: list[str] = []
    size = 0
    for path in paths:
        part.append(path)
        size += len(path)
        if size > ROW_BYTES or len(part) == ROWS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _walk_shared_folder(place: str, path: str, home: str, skipped: list[str]) -> Iterator:  # type: ignore[type-arg]
    try:
        with os.scandir(place) as entries:
            names = sorted(entry.name for entry in entries)
    except NotADirectoryError:
        skipped.append(f"{path}: a file, and job.shared names folders: let the program write it into one")
        return
    except OSError:
        return  # The folder does not exist yet, or was removed.
    for name in names:
        inner, below = os.path.join(place, name), path + "/" + name
        try:
            info = os.lstat(inner)
        except OSError:
            continue  # The file was removed.
        if not folders.is_name(name) or len(below) > 4000:
            skipped.append(f"{path}: a name that cannot be passed on")
        elif stat.S_ISDIR(info.st_mode):
            yield from _walk_shared_folder(inner, below, home, skipped)
        elif stat.S_ISREG(info.st_mode):
            yield below, inner, home, info
        else:
            skipped.append(f"{below}: {'a link' if stat.S_ISLNK(info.st_mode) else 'no regular file'}")


def find_checkpoints(run_dir: str) -> Iterator:  # type: ignore[type-arg]
    """Yield files of the working folder that are checkpoints by name or format, and that the run's programs wrote."""
    top = os.path.join(run_dir, run_workdir.FOLDER)
    for path, size, _ in run_workdir.list_written_files(run_dir, []):
        place = os.path.realpath(os.path.join(top, path))
        try:
            if all(map(folders.is_name, path.split("/"))) and _is_checkpoint(place, path, size):
                yield path, place, run_dir, os.lstat(place)
        except OSError:
            continue  # The file was removed.


def _is_checkpoint(place: str, path: str, size: int) -> bool:
    """Return whether a file has the name of a checkpoint, or another name and was written by torch.save.

    Raises:
        OSError: the file was removed.
    """
    if CHECKPOINT.search(path.rpartition("/")[2]):
        return True
    # By APPNOTE.TXT 4.3.7, the length of the name is at offset 26, and the name at 30.
    head = read_part(place, 0, min(size, 512))
    length = int.from_bytes(head[26:28], "little")
    return head[:4] == ZIP_START and head[30 : 30 + length].endswith(TORCH_MEMBER)


def check_end(place: str, size: int) -> str:
    """Return `whole` or `cut` for a file whose format shows its end, empty for any other; nothing is unpickled.

    torch.save writes a zip archive, whose directory comes last. A file of safetensors begins with the length of a
    header, which has the offset of each tensor's end (https://github.com/huggingface/safetensors, Format).
    """
    name = place.rpartition("/")[2]
    if name.endswith(".distcp"):
        return ""  # The file has several archives, and another file marks the checkpoint as complete.
    try:
        head = read_part(place, 0, min(8, size))
        if head[:4] == ZIP_START:
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
        OSError: the file cannot be read, or is shorter.
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
    """Return the files to fetch, after checking that all are below the shared folders.

    Raises:
        PushProblem: a file is not below a shared folder, or is named twice.
        InvalidMessage: the data are not a list of files.
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
        if not all(map(folders.is_name, parts)) or not find_shared_root(file.path, paths) or file.path in known:
            raise receive.PushProblem("escape", "%r is no path in a shared folder, or is named twice" % file.path)
        known.add(file.path)
    return files
