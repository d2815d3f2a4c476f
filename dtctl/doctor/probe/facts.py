"""What a node says about itself to the doctor. Stdlib only, Python 3.8; nothing is installed, changed or left."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import struct
import sys
import threading
import time

from dtctl import node_facts
from dtctl.doctor.probe import devices
from dtctl.supervisor import facts as basic

_SIOCGIFMTU = 0x8921  # linux/sockios.h
WATCHED = ("NCCL_", "TORCH_", "GLOO_", "UCX_", "FI_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MASTER_", "PYTORCH_")
LOOK_UP_LIMIT_S = 2.0
_TORCH = """
import importlib.util, json, os, sys
found = importlib.util.find_spec("torch")
said = {"executable": sys.executable, "python": sys.version.split()[0], "torch": None, "cuda": None, "nccl": None}
if found and found.origin:
    names = {}
    try:
        with open(os.path.join(os.path.dirname(found.origin), "version.py")) as file:
            exec(file.read(), names)
    except Exception:
        pass
    said["torch"], said["cuda"] = names.get("__version__", "unknown"), names.get("cuda")
    for name in os.listdir(os.path.dirname(os.path.dirname(found.origin))):
        if name.startswith("nvidia_nccl_cu") and name.endswith(".dist-info"):
            said["nccl"] = name[:-len(".dist-info")].partition("-")[2]
print(json.dumps(said))
"""


def gather(message: dict) -> dict:  # type: ignore[type-arg]
    """Everything that needs no other node.

    Args:
        message: `names` to look up, `peers` (addresses) to find the way to, `workdir`, `paths` that must exist,
            `python` of the job, `code` folder to digest or an empty string.
    """
    begun = time.monotonic()
    hostname = socket.gethostname()
    workdir = os.path.expanduser(message["workdir"])
    return {
        "op": "facts",
        "hostname": hostname,
        "user": _user(),
        "time": time.time(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "looked_up": look_up([*message["names"], hostname]),
        "interfaces": interfaces(),
        "addresses": local_addresses(),
        "reached_at": basic.server_address(),
        "ways": {peer: node_facts.interface_towards(peer) for peer in message["peers"]},
        "limits": {
            name: resource.getrlimit(getattr(resource, "RLIMIT_" + name.upper())) for name in ("nofile", "memlock")
        },
        "shm": space("/dev/shm"),  # noqa: S108 - it is what is asked about
        "disk": space(nearest(workdir)),
        "writable": writable(nearest(workdir)),
        "missing": [path for path in message["paths"] if not os.path.exists(os.path.expanduser(path))],
        "env": {name: value for name, value in os.environ.items() if name.startswith(WATCHED)},
        "conf": conf(),
        "job": job_python(message["python"]),
        **devices.devices(),
        "code": digest(message["code"]) if message["code"] else "",
        "took_s": time.monotonic() - begun,
    }


def _user() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError):
        return str(os.getuid())


def look_up(names: list) -> dict:  # type: ignore[type-arg]
    """Addresses by name; an empty list when unknown, None when nobody answered in time."""
    found = dict.fromkeys(names)

    def ask(name: str) -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found[name] = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        except (OSError, UnicodeError):
            found[name] = []

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LOOK_UP_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def interfaces() -> list:  # type: ignore[type-arg]
    """Every interface with its address (IPv4), MTU in bytes, and speed in Mbit/s (0 when it has none)."""
    found = []
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _, name in socket.if_nameindex():
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFMTU, struct.pack("256s", name.encode()[:15]))
            mtu = struct.unpack_from("i", answer, 16)[0]
        except OSError:
            mtu = 0
        speed = devices.read("/sys/class/net/%s/speed" % name)
        found.append(
            {
                "name": name,
                "address": node_facts.ipv4_of(name),
                "mtu": mtu,
                "mbit_s": int(speed) if speed.isdigit() else 0,
            }
        )
    probe.close()
    return found


def local_addresses() -> list:  # type: ignore[type-arg]
    """All IPv4 addresses of this machine, second ones too, from the kernel's routing trie."""
    found, address = [], ""
    for line in devices.read("/proc/net/fib_trie").splitlines():
        words = line.split()
        if words[:1] in (["|--"], ["+--"]):
            address = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"] and address not in found:
            found.append(address)
    return found


def nearest(path: str) -> str:
    """The folder itself or the nearest one above it that exists."""
    while path and not os.path.isdir(path):
        path = os.path.dirname(path.rstrip("/"))
    return path or "/"


def space(path: str) -> dict:  # type: ignore[type-arg]
    """Bytes and inodes of the file system below a path."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return {"path": path, "total": 0, "free": 0, "inodes": 0, "free_inodes": 0}
    return {
        "path": path,
        "total": stat.f_blocks * stat.f_frsize,
        "free": stat.f_bavail * stat.f_frsize,
        "inodes": stat.f_files,
        "free_inodes": stat.f_favail,
    }


def writable(folder: str) -> str:
    """Why a file cannot be written here; empty when it can. The file has no name and is gone at once."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError as exc:
        if exc.errno in (95, 21):  # this file system has no nameless files (EOPNOTSUPP, EISDIR)
            return "" if os.access(folder, os.W_OK) else f"{folder}: Permission denied"
        return f"{folder}: {exc.strerror}"
    try:
        os.write(fd, b"\0" * 65_536)
    except OSError as exc:
        return f"{folder}: {exc.strerror}"
    finally:
        os.close(fd)
    return ""


def conf() -> dict:  # type: ignore[type-arg]
    """NCCL's configuration files that are there: path -> text."""
    paths = ["/etc/nccl.conf", os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")]
    return {path: devices.read(path) for path in paths if os.path.isfile(path)}


def job_python(python: str) -> dict:  # type: ignore[type-arg]
    """Versions of the job's Python, of the torch that it would import, and of NCCL's wheel; torch is not loaded."""
    try:
        said: dict = json.loads(devices.tool([python, "-c", _TORCH]) or "{}")  # type: ignore[type-arg]
    except ValueError:
        return {}
    return said


def digest(folder: str) -> str:
    """Digest of the Python files below a folder; empty when it is not there."""
    import hashlib

    folder = os.path.expanduser(folder)
    found = hashlib.blake2b(digest_size=8)
    count = 0
    for where, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            if name.endswith(".py") and count < 5000:
                count += 1
                found.update(os.path.relpath(os.path.join(where, name), folder).encode() + b"\0")
                found.update(devices.read(os.path.join(where, name)).encode() + b"\0")
    return found.hexdigest() if count else ""
