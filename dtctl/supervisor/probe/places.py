"""Tests that a job can write files to its folder, TMPDIR and folders of variables. Stdlib only, Python 3.8.

No file is left, since files are written without a name, or not at all.
"""

from __future__ import annotations

import errno
import os

_NOEXEC = 8  # This is ST_NOEXEC of statvfs(3), which Python does not define on all systems.
WRITTEN = (
    "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "WANDB_DIR", "XDG_CACHE_HOME", "MPLCONFIGDIR",
    "PYTHONPYCACHEPREFIX", "CUDA_CACHE_PATH", "NCCL_DEBUG_FILE", "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_TOPO_DUMP_FILE",
)  # fmt: skip
"""Variables with paths that a job writes to, in addition to those that end as in `WRITTEN_ENDS`."""
WRITTEN_ENDS = ("_CACHE", "_CACHE_DIR", "_CACHE_PATH", "_CACHE_HOME")
_READ_ENDS = ("_FILE", "_CA_BUNDLE", "_CREDENTIALS")
_READ_OF = (
    "NCCL_", "RCCL_", "TORCH", "GLOO_", "UCX_", "FI_", "CUDA_", "AWS_", "AZURE_", "GOOGLE_", "SSL_", "REQUESTS_",
    "CURL_", "HF_", "WANDB_", "MLFLOW_", "COMET_", "DEEPSPEED_", "OMPI_", "SLURM_", "PMIX_",
)  # fmt: skip
"""Prefixes of libraries whose files a training run reads; others (`TF_CLI_CONFIG_FILE`) belong to unrelated tools."""
_PRELOADED = ("LD_PRELOAD", "LD_AUDIT")


def gather_place_facts(workdir: str, env: dict) -> dict:  # type: ignore[type-arg]
    """Return `disk`, `writable`, `tmp`, `shm`, and `files`: problems with the paths in variables of `env`, by name."""
    folder, why = find_usable_folder(workdir)
    return {
        "shm": {**read_disk_space("/dev/shm"), "why": check_folder_writable("/dev/shm")},  # noqa: S108 - this folder is the subject
        "disk": read_disk_space(folder),
        "writable": why,
        "tmp": _describe_temporary_folder(env),
        "files": _check_named_paths(env),
    }


def find_nearest_path(path: str) -> str:
    """Return the path itself if it exists, or the nearest existing folder above it."""
    while path and not os.path.lexists(path):
        path = os.path.dirname(path.rstrip("/"))
    return path or "/"


def find_usable_folder(path: str) -> tuple:  # type: ignore[type-arg]
    """Return the nearest existing folder, and the reason why it is not writable, empty if it is."""
    place = find_nearest_path(path)
    if not os.path.isdir(place):
        return os.path.dirname(place) or "/", "%s: it is a file, not a folder" % place
    return place, check_folder_writable(place)


def read_disk_space(path: str) -> dict:  # type: ignore[type-arg]
    """Return bytes and inodes of the file system below a path, and whether programs may be run from it."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return {"path": path, "total": 0, "free": 0, "inodes": 0, "free_inodes": 0, "noexec": False}
    return {
        "path": path,
        "total": stat.f_blocks * stat.f_frsize,
        "free": stat.f_bavail * stat.f_frsize,
        "inodes": stat.f_files,
        "free_inodes": stat.f_favail,
        "noexec": bool(stat.f_flag & _NOEXEC),
    }


def check_folder_writable(folder: str) -> str:
    """Return the reason why a folder is not writable; empty if it is. The test uses a file without a name."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError as exc:
        if exc.errno in (errno.EOPNOTSUPP, errno.EISDIR):  # The file system does not support files without a name.
            return _by_rights(folder)
        return "%s: %s" % (folder, exc.strerror)
    try:
        os.write(fd, b"\0" * 65_536)
    except OSError as exc:
        return "%s: %s" % (folder, exc.strerror)
    finally:
        os.close(fd)
    return ""


def _by_rights(folder: str) -> str:
    try:
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            return "%s: %s" % (folder, os.strerror(errno.EROFS))
    except OSError as exc:
        return "%s: %s" % (folder, exc.strerror)
    # No process can create a file in the kernel's own folders, regardless of their permissions.
    if _read_device_id(folder) in (_read_device_id("/proc"), _read_device_id("/sys")):
        return "%s: it belongs to the kernel and cannot hold files" % folder
    return "" if os.access(folder, os.W_OK) else "%s: %s" % (folder, os.strerror(errno.EACCES))


def _read_device_id(path: str) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return -1


def _describe_temporary_folder(env: dict) -> dict:  # type: ignore[type-arg]
    """Return the folder of temporary files: `read_disk_space` of it, `why` it is not writable, and its `origin`."""
    origin = "TMPDIR" if env.get("TMPDIR") else ""
    path = env.get("TMPDIR") or "/tmp"  # noqa: S108 - this folder is the subject
    return {**read_disk_space(path), "why": _check_existing_folder(path), "origin": origin}


def _check_existing_folder(path: str) -> str:
    """Return the reason why a folder is missing or not writable; empty if it is there."""
    if os.path.isdir(path):
        return check_folder_writable(path)
    is_there = os.path.lexists(path)
    return ("%s: it is a file, not a folder" % path) if is_there else "%s: %s" % (path, os.strerror(errno.ENOENT))


def _check_named_paths(env: dict) -> dict:  # type: ignore[type-arg]
    """Return the problem with the file or folder that a variable names, by variable."""
    found = {}
    for name, value in env.items():
        problem = _check_named_path(name, value)
        if problem:
            found[name] = problem
    return found


def _check_named_path(name: str, value: str) -> str:
    """Return the problem with the file or folder that a variable names; empty if there is none."""
    if name in WRITTEN or name.endswith(WRITTEN_ENDS):
        path = os.path.expanduser(value.split("%", 1)[0])
        if not os.path.isabs(path):
            return ""
        if name.endswith("_FILE"):
            return _check_existing_folder(os.path.dirname(path))
        problem: str = find_usable_folder(path)[1]
        return problem
    if name in _PRELOADED:
        paths = value.replace(" ", ":").split(":")
    elif name.endswith(_READ_ENDS) and name.startswith(_READ_OF):
        paths = [os.path.expanduser(value)]
    else:
        return ""
    lost = [path for path in paths if os.path.isabs(path) and not os.path.exists(path)]
    return "%s: %s" % (lost[0], os.strerror(errno.ENOENT)) if lost else ""
