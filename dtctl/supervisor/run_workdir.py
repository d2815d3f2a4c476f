"""Working folder of a run with its code, which its programs may change freely.

    RUN_DIR/work         folder in which the run's programs start
                         (under Slurm a link to the one folder of all nodes)
    RUN_DIR/work.json    way in which the code was made available, and the files of the code; all others are outputs
    RUN_DIR/.overlay     further folders that an overlay needs
    RUN_DIR/ahead        copies of shared folders that arrived before the working folder was made (shared.py)

The code is a pushed tree, which all runs of the same code share, or a folder of the user on the nodes. A run must not
change it: files are cloned or copied, or are the lower layer of an overlay that only the run's processes see. Stdlib
only, Python 3.8.
"""

from __future__ import annotations

import errno
import json
import os
import stat

from dtctl import folders
from dtctl.supervisor.messages.attempt import OutputSummary

FOLDER = "work"
AHEAD = "ahead"
RECORD = "work.json"
MANY_ROWS_BYTES = 16 << 10
"""Bytes of a tree's seal (some 200 for each file) above which an overlay is preferred to copies of the files."""
MANY_FILES = 80
MANY_BYTES = 16 << 20
MOST_COPIED_BYTES = 1 << 30
"""Most bytes of a user's folder that are copied, since it may contain the data of a whole group."""
STATE_FOLDER = b".dtctl"
"""Folder of dtctl's records next to a spec, which no program reads."""
COMPILED = "__pycache__"

_FICLONE = 0x40049409
_CLONE_NEWNS = 0x00020000
_MS_SLAVE_ALL = 0x80000 | 0x4000
_MS_BIND = 0x1000
_CANNOT = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM, errno.ETXTBSY)
LINK_MODE, FOLDER_MODE = 0o120000, 0o040000

_below_overlay = -1
"""Descriptor of the upper layer of the overlay that this process has mounted, with the written files; -1: none."""


class WorkdirTooLarge(Exception):
    """The user's folder would have to be copied, and is too large for that."""


def find_working_folder(run_dir: str) -> str:
    """Return the run's working folder; empty if there is none."""
    return os.path.join(run_dir, FOLDER) if os.path.exists(os.path.join(run_dir, RECORD)) else ""


def holds_copies_alone(run_dir: str) -> bool:
    """Return whether a run has only copies of shared folders on this node, which arrived ahead (shared.py)."""
    names = [name for name in os.listdir(run_dir) if not name.startswith(".incoming-")]
    return AHEAD in names and set(names) <= {AHEAD, "shared.json", "shared.json.partial"}


def prepare_working_folder(
    run_dir: str,
    code: str,
    outputs: list[str],
    earlier_dir: str,
    is_pushed: bool = True,
    may_mount: bool = True,
    data: list[tuple[str, str]] | None = None,
    replicated: list[str] | None = None,
) -> None:
    """Make the working folder unless an earlier attempt has; mount an overlay for this process and its children.

    Args:
        run_dir: folder of the run.
        code: pushed tree, which the caller has locked against removal, or the user's own folder; empty: an existing
            working folder is used, or an empty one is made.
        outputs: paths in the working folder that the run shares with an earlier one.
        earlier_dir: folder of the earlier run; empty: there is none.
        is_pushed: whether `code` is a pushed tree.
        may_mount: whether an overlay is possible: this process, or none, starts the run's programs.
        data: paths in the working folder, each with the target of its link.
        replicated: folders in the working folder whose files all nodes have (`job.shared`).

    Raises:
        OSError: the working folder cannot be made.
        WorkdirTooLarge: the user's folder can neither be the lower layer of an overlay nor be cloned.
    """
    record = _read_work_record(run_dir)
    if record is None:
        if code:
            folders.remove_folder_tree(os.path.join(run_dir, FOLDER))
        if not code:
            record = _take_existing_folder(run_dir)
        elif is_pushed:
            record = _make_working_folder(run_dir, code, may_mount, data or [])
        else:
            record = _make_of_folder(run_dir, os.path.realpath(code), may_mount, data or [])
        for path in _find_outermost_paths([*outputs, *(replicated or [])]) if earlier_dir else ():
            _link_earlier_outputs(path, run_dir, earlier_dir)
        _write_work_record(os.path.join(run_dir, RECORD), record)
    elif record["how"] == "overlay" and not _mount_overlay(run_dir, str(record["code"])):
        raise OSError(errno.EPERM, "the overlay of the working folder cannot be mounted again", run_dir)
    if _below_overlay >= 0:
        for path in replicated or ():
            _bind_overlay_folder(path, run_dir, str(record["code"]))
    if os.path.isdir(os.path.join(run_dir, AHEAD)):
        _move_missing_files(os.path.join(run_dir, AHEAD), _writable_folder(run_dir))


def share_code_folder(run_dir: str, code: str) -> None:
    """Use a folder that other nodes use, too, as the working folder, without counting its files as outputs."""
    if _read_work_record(run_dir) is None:
        folders.remove_folder_tree(os.path.join(run_dir, FOLDER))
        os.symlink(os.path.abspath(code), os.path.join(run_dir, FOLDER))
        _write_work_record(os.path.join(run_dir, RECORD), {"how": "shared", "code": code, "files": []})


def _take_existing_folder(run_dir: str) -> dict:  # type: ignore[type-arg]
    folder = os.path.join(run_dir, FOLDER)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    rows: list = []  # type: ignore[type-arg]
    _collect_tree_rows(os.fsencode(folder), b"", b"", rows)
    found = [(row[0], os.lstat(os.path.join(os.fsencode(folder), row[0].encode("latin-1")))) for row in rows]
    return {"how": "copy", "code": "", "files": [(name, *_build_file_stamp(info)) for name, info in found]}


def _build_file_stamp(info: os.stat_result) -> tuple:  # type: ignore[type-arg]
    """Return size, modification time and inode of a file, by which a change is detected."""
    return info.st_size, info.st_mtime_ns, info.st_ino


def copy_record(run_dir: str, other_dir: str) -> None:
    """Copy the record of a run's code to a run whose working folder will be a copy of this run's."""
    record = _read_work_record(run_dir)
    if record is not None:
        files = [row[:3] for row in record["files"]]  # Inodes are left out, since copies have others.
        _write_work_record(os.path.join(other_dir, RECORD), {**record, "files": files})


def _make_working_folder(run_dir: str, code: str, may_mount: bool, data: list[tuple[str, str]]) -> dict:  # type: ignore[type-arg]  # typing is slow to import on a node
    folder = os.path.join(run_dir, FOLDER)
    os.mkdir(folder, 0o700)
    seal = code + ".json"
    rows = [] if may_mount and os.stat(seal).st_size > MANY_ROWS_BYTES else _read_seal_rows(seal)
    if may_mount and (not rows or sum(row[2] for row in rows) > MANY_BYTES):
        written = _link_data_paths(data, folder)
        if _mount_overlay(run_dir, code):
            return {"how": "overlay", "code": code, "files": written}
        folders.remove_folder_tree(folder)
        os.mkdir(folder, 0o700)
    written = _copy_tree_rows(rows or _read_seal_rows(seal), code, folder)
    return {"how": "copy", "code": code, "files": written + _link_data_paths(data, folder)}


def _link_data_paths(data: list[tuple[str, str]], folder: str) -> list:  # type: ignore[type-arg]
    """Make links in a folder to files elsewhere; return their rows in the form of `_copy_tree_rows`.

    Raises:
        FileExistsError: the code has a file at the same path.
    """
    written = []
    for to, target in data:
        path = os.path.join(folder, to)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        os.symlink(target, path)
        written.append((os.fsencode(to).decode("latin-1"), *_build_file_stamp(os.lstat(path))))
    return written


def _make_of_folder(run_dir: str, code: str, may_mount: bool, data: list[tuple[str, str]]) -> dict:  # type: ignore[type-arg]
    folder = os.path.join(run_dir, FOLDER)
    os.mkdir(folder, 0o700)
    rows: list = []  # type: ignore[type-arg]
    _collect_tree_rows(os.fsencode(code), b"", os.fsencode(os.path.dirname(os.path.realpath(run_dir))), rows)
    size = sum(row[2] for row in rows)
    if may_mount and (len(rows) > MANY_FILES or size > MANY_BYTES):
        # In the working folder, a relative link to a path outside would have another target, so these links are copied.
        links = [row for row in rows if row[1] == LINK_MODE and row[4][:1] == "/" and row[5]]
        written = _copy_tree_rows(links, code, folder) + _link_data_paths(data, folder)
        if _mount_overlay(run_dir, code):
            return {"how": "overlay", "code": code, "files": written}
        folders.remove_folder_tree(folder)
        os.mkdir(folder, 0o700)
    written = _copy_tree_rows(rows, code, folder, size)
    return {"how": "copy", "code": code, "files": written + _link_data_paths(data, folder)}


def _collect_tree_rows(top: bytes, prefix: bytes, own: bytes, rows: list) -> None:  # type: ignore[type-arg]
    """Add a row for each file, link and empty folder: path, mode, size, empty, target, whether the target was changed.

    Args:
        top: the user's folder.
        prefix: path of the listed folder below `top`, with a slash at its end.
        own: folder of all runs, which is left out.
        rows: list to which the rows are added.
    """
    with os.scandir(os.path.join(top, prefix)) as entries:
        for entry in entries:
            path = prefix + entry.name
            if entry.is_symlink():
                link = os.readlink(entry.path)
                target = os.path.normpath(os.path.join(os.path.dirname(entry.path), link))
                leads_out = link[:1] != b"/" and not (target + b"/").startswith(top + b"/")
                link = target if leads_out else link
                rows.append((path.decode("latin-1"), LINK_MODE, 0, "", link.decode("latin-1"), leads_out))
            elif entry.is_dir():
                if entry.name != STATE_FOLDER and entry.path != own:
                    count = len(rows)
                    _collect_tree_rows(top, path + b"/", own, rows)
                    if len(rows) == count:
                        rows.append((path.decode("latin-1"), FOLDER_MODE, 0, "", "", False))
            elif entry.is_file():
                info = entry.stat()
                rows.append((path.decode("latin-1"), info.st_mode & 0o777, info.st_size, "", "", False))


def _read_seal_rows(seal: str) -> list:  # type: ignore[type-arg]
    """Return path, mode, size, digest and link of each file from a seal of `receive_tree`."""
    with open(seal, "rb") as file:
        return [row[:5] for row in json.loads(file.read().decode())["files"]]


def _copy_tree_rows(rows: list, code: str, folder: str, size: int = 0) -> list:  # type: ignore[type-arg]
    """Clone or copy every file; return path, size, modification time and inode of each.

    Raises:
        WorkdirTooLarge: the files cannot be cloned, and `size`, their total in bytes, is too large for copies.
    """
    source = os.open(code, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    target = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    folders_made, written, copy = {b""}, [], _FileCopier(size)
    try:
        for name, mode, _, _, link, *_ in rows:
            path = name.encode("latin-1")
            if mode == FOLDER_MODE:
                _make_folders(path, folders_made, target)
                continue
            _make_folders(path.rpartition(b"/")[0], folders_made, target)
            if mode == LINK_MODE:
                os.symlink(link.encode("latin-1"), path, dir_fd=target)
                info = os.stat(path, dir_fd=target, follow_symlinks=False)
            else:
                info = copy.file(path, mode, source, target)
            written.append((name, *_build_file_stamp(info)))
    finally:
        os.close(source)
        os.close(target)
    return written


def _make_folders(path: bytes, folders_made: set, target: int) -> None:  # type: ignore[type-arg]
    if path not in folders_made:
        _make_folders(path.rpartition(b"/")[0], folders_made, target)
        os.mkdir(path, 0o700, dir_fd=target)
        folders_made.add(path)


class _FileCopier:
    """Copier of files, which uses the cheapest method that the file system supports."""

    def __init__(self, size: int) -> None:
        self.clones = self.in_kernel = True
        self.size = size

    def file(self, path: bytes, mode: int, source: int, target: int) -> os.stat_result:
        """Copy one file; return the `fstat` result of the copy."""
        read_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=source)
        try:
            write_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=target)
            try:
                self._copy_file_contents(read_fd, write_fd)
                return os.fstat(write_fd)
            finally:
                os.close(write_fd)
        finally:
            os.close(read_fd)

    def _copy_file_contents(self, read_fd: int, write_fd: int) -> None:
        if self.clones:
            import fcntl

            try:
                fcntl.ioctl(write_fd, _FICLONE, read_fd)
                return
            except OSError as exc:
                if exc.errno not in _CANNOT:
                    raise
                self.clones = False
        if self.size > MOST_COPIED_BYTES:
            raise WorkdirTooLarge("it holds %d MiB" % (self.size >> 20))
        while self.in_kernel:
            try:
                if not os.copy_file_range(read_fd, write_fd, 1 << 30):
                    return
            except AttributeError:  # The call exists only on Linux.
                self.in_kernel = False
            except OSError as exc:
                if exc.errno not in _CANNOT:
                    raise
                self.in_kernel = False
        data = os.read(read_fd, 1 << 20)
        while data:
            data = data[os.write(write_fd, data) :] or os.read(read_fd, 1 << 20)


def _mount_overlay(run_dir: str, code: str) -> bool:
    """Mount an overlay on the working folder, for this process and its children; return whether this was possible."""
    folder, beside = os.path.join(run_dir, FOLDER), os.path.join(run_dir, ".overlay")
    if os.geteuid() != 0 or any(sign in folder + code for sign in ",:\\"):
        return False
    import ctypes

    global _below_overlay  # noqa: PLW0603 - there is one run in a process
    try:
        os.makedirs(beside, mode=0o700, exist_ok=True)
        libc = ctypes.CDLL(None)
        # The working folder is also the upper layer: outside of the overlay, its path has the files that the run wrote.
        options = "lowerdir=%s,upperdir=%s,workdir=%s,redirect_dir=on" % (code, folder, beside)
        done = (
            libc.unshare(_CLONE_NEWNS) == 0
            and libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_SLAVE_ALL), None) == 0
        )
        # The descriptor has to be opened in the new namespace: `_bind_overlay_folder` cannot mount one from another.
        _below_overlay = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        done = (
            done
            and libc.mount(b"overlay", os.fsencode(folder), b"overlay", ctypes.c_ulong(0), os.fsencode(options)) == 0
        )
    except (AttributeError, OSError):  # The system is not Linux, or does not allow this.
        done = False
    if not done:
        if _below_overlay >= 0:
            os.close(_below_overlay)
        _below_overlay = -1
        folders.remove_folder_tree(beside)
    return bool(done)


def _find_outermost_paths(paths: list[str]) -> list[str]:
    """Return the paths that are not below another one of them."""
    names = sorted({path.strip("/") for path in paths if not path.startswith("/")})
    return [name for name in names if not any(name.startswith(other + "/") for other in names)]


def _writable_folder(run_dir: str) -> str:
    """Return the working folder, or the upper layer of its overlay, which is on the disk of the run's folder."""
    return "/proc/self/fd/%d" % _below_overlay if _below_overlay >= 0 else os.path.join(run_dir, FOLDER)


def _bind_overlay_folder(path: str, run_dir: str, code: str) -> None:
    """Mount a folder of the overlay's upper layer in the overlay, so that files written from outside appear in it.

    Direct changes of a layer need not become visible in the overlay (Documentation/filesystems/overlayfs.rst, "Changes
    to underlying filesystems").

    Raises:
        OSError: the folder cannot be mounted.
    """
    merged, below = os.path.join(run_dir, FOLDER, path), os.path.join(_writable_folder(run_dir), path)
    if os.path.realpath(merged) != os.path.join(os.path.realpath(run_dir), FOLDER, path):
        return  # The path is a link to the folder of an earlier run, which is outside of this overlay.
    os.makedirs(merged, mode=0o700, exist_ok=True)
    os.makedirs(below, mode=0o700, exist_ok=True)
    if os.path.isdir(os.path.join(code, path)):
        _copy_missing_files(os.path.join(code, path), below)
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(below), os.fsencode(merged), None, ctypes.c_ulong(_MS_BIND), None) != 0:
        raise OSError(ctypes.get_errno(), "a shared folder cannot be mounted", merged)


def _copy_missing_files(source: str, target: str) -> None:
    """Copy the files that the code has in a shared folder, unless a file with the same name exists."""
    import shutil

    for name in os.listdir(source):
        theirs, ours = os.path.join(source, name), os.path.join(target, name)
        if os.path.isdir(theirs) and not os.path.islink(theirs):
            os.makedirs(ours, mode=0o700, exist_ok=True)
            _copy_missing_files(theirs, ours)
        elif not os.path.lexists(ours):
            shutil.copy2(theirs, ours, follow_symlinks=False)


def _move_missing_files(source: str, target: str) -> None:
    """Move copies that arrived ahead to the working folder, unless a file with the same name exists."""
    for name in os.listdir(source):
        theirs, ours = os.path.join(source, name), os.path.join(target, name)
        if not os.path.lexists(ours):
            os.rename(theirs, ours)
        elif os.path.isdir(theirs) and os.path.isdir(ours):
            _move_missing_files(theirs, os.path.realpath(ours))
    try:
        os.rmdir(source)
    except OSError:
        pass  # Files that exist in both folders stay.


def _link_earlier_outputs(path: str, run_dir: str, earlier_dir: str) -> None:
    """Link a path of the working folder to an earlier run's outputs, so that the run continues them in place."""
    theirs = os.path.realpath(os.path.join(earlier_dir, FOLDER, path))
    ours = os.path.join(run_dir, FOLDER, path.rstrip("/"))
    if not os.path.exists(theirs):
        return
    folders.remove_folder_tree(ours)  # This is a copy of pushed files.
    os.makedirs(os.path.dirname(ours), mode=0o700, exist_ok=True)
    os.symlink(theirs, ours)


def _read_work_record(run_dir: str) -> dict | None:  # type: ignore[type-arg]
    try:
        with open(os.path.join(run_dir, RECORD), "rb") as file:
            record = json.loads(file.read().decode())
            return record if isinstance(record, dict) and record.keys() >= {"how", "code", "files"} else None
    except (OSError, ValueError):
        return None


def _write_work_record(path: str, record: dict) -> None:  # type: ignore[type-arg]
    with open(path + ".partial", "wb") as file:
        file.write(json.dumps(record, separators=(",", ":")).encode())
    os.replace(path + ".partial", path)


# -- files that the run's programs have written -------------------------------------------------------------------


def list_written_files(run_dir: str, paths: list):  # type: ignore[no-untyped-def, type-arg]
    """Yield path, size in bytes and mtime (ns) of the regular files that the run's programs made or changed.

    Links are neither followed nor listed, except that a requested path may be a link, and that links to outputs of an
    earlier run, which this run continues, are followed.

    Args:
        run_dir: folder of the run.
        paths: paths to list, relative to the working folder, or absolute, which are yielded without the first slash;
            empty: the whole working folder without compiled modules.
    """
    for file, info in _find_written_entries(run_dir, paths):
        if stat.S_ISREG(info.st_mode):
            yield file, info.st_size, info.st_mtime_ns


def list_written_links(run_dir: str, paths: list):  # type: ignore[no-untyped-def, type-arg]
    """Yield path and target of the symbolic links that the run's programs made or changed; see `list_written_files`.

    An absolute target in the working folder is returned relative to the link.
    """
    top = os.path.join(run_dir, FOLDER)
    for file, info in _find_written_entries(run_dir, paths):
        if stat.S_ISLNK(info.st_mode):
            try:
                target = os.readlink(os.path.join(top, file))
            except OSError:
                continue  # The link was removed.
            if target.startswith(top + "/"):
                target = os.path.relpath(target, os.path.join(top, os.path.dirname(file)))
            yield file, target


def _find_written_entries(run_dir: str, paths: list):  # type: ignore[no-untyped-def, type-arg]
    record, top = _read_work_record(run_dir), os.path.join(run_dir, FOLDER)
    if _below_overlay >= 0:
        top = "/proc/self/fd/%d/." % _below_overlay
    if record is None or record["how"] == "shared":
        return
    pushed = {row[0]: tuple(row[1:]) for row in record["files"]}
    takes_all = not paths
    for path in paths or [""]:
        name = path.strip("/")
        start = "/" + name if path.startswith("/") else os.path.join(top, name)
        if os.path.islink(start):
            start = os.path.realpath(start)
        for file, info in _walk_files_and_links(start, name, skip=(COMPILED,) if takes_all else ()):
            facts = _build_file_stamp(info)
            known = pushed.get(os.fsencode(file).decode("latin-1"))
            # Records of copies have no inode, see `copy_record`.
            if takes_all and known is not None and known == facts[: len(known)]:
                continue
            is_link = stat.S_ISLNK(info.st_mode)
            place = _find_earlier_output(run_dir, top, file) if takes_all and is_link else None
            if place:
                yield from _walk_files_and_links(place, file, skip=(COMPILED,))
            else:
                yield file, info


def _find_earlier_output(run_dir: str, top: str, link: str) -> str:
    """Return the place that a link leads to if it is in the working folder of an earlier run; empty otherwise."""
    own = os.path.realpath(run_dir) + "/"
    place = os.path.realpath(os.path.join(top, link))
    return place if place.startswith(os.path.dirname(own[:-1]) + "/") and not place.startswith(own) else ""


def _walk_files_and_links(start: str, name: str, skip: tuple):  # type: ignore[no-untyped-def, type-arg]
    """Yield regular files and links below a path, each with its `lstat` result; leave out files removed meanwhile."""
    try:
        info = os.lstat(start)
        if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
            yield name, info
            return
        entries = sorted(os.listdir(start)) if stat.S_ISDIR(info.st_mode) else []
    except OSError:
        return
    for entry in entries:
        if entry not in skip:
            yield from _walk_files_and_links(os.path.join(start, entry), name + "/" + entry if name else entry, skip)


def summarize_outputs(run_dir: str, paths: list[str], limit: int = 100_000) -> OutputSummary:
    """Return the folder of a run's outputs, and the numbers of files and bytes, counted up to the limit."""
    files = size = 0
    for _, file_size, _ in list_written_files(run_dir, paths):
        files, size = files + 1, size + file_size
        if files >= limit:
            break
    return OutputSummary(folder=os.path.join(run_dir, FOLDER), files=files, bytes=size)
