"""Files in folders that others may write to: links are not followed, and only dtctl's own files are removed.

Used on the control machine, in the workers and, as part of the supervisor's program, on nodes. Needs only the standard
library of Python 3.8.
"""

from __future__ import annotations

import os
import stat
import zlib

MARKER = ".dtctl"
"""Name of the file that marks a folder as made by dtctl. Below a folder without this file, dtctl removes nothing."""
NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags for opening files: links are not followed, and a pipe without a writer does not block."""


class NotPrivateError(OSError):
    """Error: a folder or file is not private to this user; `fix` is the shell command that corrects this."""

    def __init__(self, text: str, path: str, fix: str) -> None:
        """Store the problem with `path`, and the command that corrects it."""
        super().__init__(1, text, path)
        self.fix = fix

    def __str__(self) -> str:
        return "%s: %s; fix it with `%s`" % (self.filename, self.strerror, self.fix)


class NotRegularFileError(OSError):
    """Error: the path is a folder, a device, a pipe or a socket."""


def check_private(path: str) -> None:
    """Refuse a folder that other users own or may write to; a folder that does not exist yet is accepted.

    A user who may write to a folder may replace each file in it. The owners of parent folders are trusted, but parents
    in which any user may rename entries (mode o+w without the sticky bit) are refused.

    Raises:
        NotPrivateError: another user owns the folder or may write to it.
    """
    # An absolute path never begins with `-`, so it also works as an argument of the suggested shell command.
    path = os.path.realpath(path)
    try:
        info = os.stat(path)
    except FileNotFoundError:
        info = None
    if info is not None:
        _check_owner(path, info)
        if info.st_mode & 0o002 or (info.st_mode & 0o020 and not _own_group(info.st_gid)):
            raise NotPrivateError("others may write to it", path, "chmod go-w %s" % _quote_path(path))
    above = os.path.dirname(path)
    while True:
        try:
            mode = os.stat(above).st_mode
        except OSError:
            mode = 0
        if mode & 0o002 and not mode & stat.S_ISVTX:
            raise NotPrivateError("every user may replace its contents", above, "chmod o-w %s" % _quote_path(above))
        if above == os.path.dirname(above):
            return
        above = os.path.dirname(above)


def make_private(path: str) -> None:
    """Make a folder and its parents unless they exist; afterwards the folder is private to this user.

    Raises:
        NotPrivateError: see `check_private`.
        OSError: the folder cannot be made.
    """
    check_private(path)
    os.makedirs(path, mode=0o700, exist_ok=True)
    check_private(path)


def _check_owner(path: str, info: os.stat_result) -> None:
    uid = os.geteuid()
    if info.st_uid not in (uid, 0):  # root can access everything in any case
        fix = "sudo chown -R %d %s" % (uid, _quote_path(path))
        raise NotPrivateError("it belongs to user %d, not to %d" % (info.st_uid, uid), path, fix)


def _own_group(gid: int) -> bool:
    """Return whether a group has the user's name and is theirs alone, the default of many systems (umask 002)."""
    import grp
    import pwd

    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _quote_path(path: str) -> str:
    return path if all(c.isalnum() or c in "/._-+@" for c in path) else "'" + path.replace("'", "'\\''") + "'"


# -- reading and writing ------------------------------------------------------------------------------------------


def open_folder(path: str, parent: int | None = None) -> int:
    """Return a descriptor of a folder, without following a link.

    Raises:
        OSError: the path is a link, or no folder.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | NO_LINK, dir_fd=parent)


def create_in(folder: int, name: str, mode: int = 0o600) -> int:
    """Return a descriptor of a new file in an open folder; an existing file or link is an error.

    Raises:
        ValueError: the name is not that of a file in this folder.
        OSError: the name exists already, or the file cannot be made.
    """
    if not is_name(name):
        raise ValueError("%r is not the name of a file" % (name,))
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)


def is_name(name: object) -> bool:
    """Return whether this is the name of one file: no path, no control characters, and not too long."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "/" not in name
        and name.isprintable()
        and len(name.encode("utf-8", "surrogatepass")) <= 255
    )


def open_regular(path: str, *, follow: bool = True) -> int:
    """Return a descriptor of a regular file; a pipe or a device is refused before a byte is read.

    Raises:
        NotRegularFileError: the path is not a regular file.
        OSError: the file cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a pipe"}
    raise NotRegularFileError(22, "it is %s, not a regular file" % kinds.get(stat.S_IFMT(mode), "something else"), path)


def read_regular(path: str, limit_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        NotRegularFileError: the path is not a regular file.
        OSError: the file cannot be read, or is larger than the limit (EFBIG).
    """
    with open(open_regular(path), "rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise OSError(27, "it is larger than %d MiB" % (limit_bytes >> 20), path)
    return data


def sync_folder_entries(path: str) -> None:
    """Sync a folder, so that new names in it survive a power failure; an error of the file system is ignored."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def make_durable(path: str, mode: int = 0o777) -> None:
    """Make a folder and its parents unless they exist, so that their names survive a power failure.

    Raises:
        OSError: the folder cannot be made, or the path is something else.
    """
    above = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(above):
        make_durable(above, mode)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return
    sync_folder_entries(above)


# -- removing -----------------------------------------------------------------------------------------------------


def mark_own_folder(path: str, ours) -> bool:  # type: ignore[no-untyped-def]  # Callable would have to come from typing
    """Return whether a folder has dtctl's mark; a folder in which all names are dtctl's gets the mark now.

    Args:
        path: the folder.
        ours: function that returns whether dtctl gives a file in this folder such a name.
    """
    marker = os.path.join(path, MARKER)
    try:
        if stat.S_ISREG(os.lstat(marker).st_mode):
            return True
    except FileNotFoundError:
        pass
    if not all(ours(name) for name in os.listdir(path)):
        return False
    try:
        os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        pass  # another process has just written the mark
    return True


def remove_folder_tree(path: str) -> list[str]:
    """Remove a file, or a folder with everything below it, but nothing that lies elsewhere.

    Links are removed and never followed, and mounted file systems below the folder stay.

    Returns:
        Paths that are left, the innermost first; empty if everything was removed.
    """
    above, name = os.path.split(os.path.abspath(path))
    try:
        parent = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    except OSError:
        return [path]
    try:
        unremoved: list[str] = []
        _remove_entry(parent, name, path, identify_mount(parent), unremoved)
        return unremoved
    finally:
        os.close(parent)


def _remove_entry(parent: int, name: str, path: str, mount: object, unremoved: list[str]) -> None:
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=parent)
            return
        folder = open_folder(name, parent)
    except FileNotFoundError:
        return  # another process removes the same path
    except OSError:
        unremoved.append(path)
        return
    try:
        if identify_mount(folder) != mount:
            unremoved.append(path)
            return
        for entry in os.listdir(folder):
            _remove_entry(folder, entry, os.path.join(path, entry), mount, unremoved)
    except (OSError, RecursionError):
        unremoved.append(path)
        return
    finally:
        os.close(folder)
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except OSError:
        unremoved.append(path)


def identify_mount(fd: int) -> object:
    """Return the identifier of a mount; bind mounts of one file system have different ones."""
    try:
        with open("/proc/self/fdinfo/%d" % fd) as file:
            for line in file:
                if line.startswith("mnt_id:"):
                    return line
    except OSError:
        pass
    return os.fstat(fd).st_dev


def choose_memory_folder(run_dir: str) -> str:
    """Return the folder on this node in which a run may keep snapshots in memory while it runs."""
    digest = zlib.crc32(os.fsencode(run_dir))
    return "/dev/shm/dtctl-%d-%s-%08x" % (os.getuid(), os.path.basename(run_dir), digest)  # noqa: S108 - made private
