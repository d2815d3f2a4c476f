"""Facts of a node for the doctor. Stdlib only, Python 3.8; nothing is installed, changed or left."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import threading
import time

from dtctl import node_facts
from dtctl.supervisor import facts as basic
from dtctl.supervisor.messages.probe import AskFacts
from dtctl.supervisor.probe import devices, limits, places

_SIOCGIFFLAGS = 0x8913  # linux/sockios.h
_SIOCGIFMTU = 0x8921
_SIOCGIFHWADDR = 0x8927
_IFF_UP = 1
WATCHED = (
    *("NCCL_", "RCCL_", "TORCH_", "GLOO_", "UCX_", "FI_", "HSA_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "MASTER_", "PYTORCH_", "LD_", "PYTHONPATH"),
)
LOOK_UP_LIMIT_S = 2.0


def gather(request: AskFacts) -> dict:  # type: ignore[type-arg]
    """Everything that needs no other node."""
    begun = time.monotonic()
    hostname = socket.gethostname()
    workdir = os.path.expanduser(request.workdir)
    env = {**os.environ, **request.env}
    return {
        "hostname": hostname,
        "user": _user(),
        "time": time.time(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        **limits.limits(),
        **places.places(workdir, env),
        "looked_up": look_up([*request.names, hostname]),
        "interfaces": interfaces(),
        "addresses": local_addresses(),
        "reached_at": basic.server_address(),
        "ways": {peer: node_facts.interface_towards(peer) for peer in request.peers},
        "neighbours": neighbours(request.peers),
        "missing": [path for path in request.paths if not os.path.exists(os.path.expanduser(path))],
        "env": {name: value for name, value in os.environ.items() if name.startswith(WATCHED)},
        "conf": conf(),
        **devices.devices(),
        "code": digest(request.code) if request.code else "",
        "took_s": time.monotonic() - begun,
    }


def _user() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError):
        return str(os.getuid())


def look_up(names: list) -> dict:  # type: ignore[type-arg]
    """Return addresses by name; an empty list when unknown, None without an answer in time."""
    addresses = dict.fromkeys(names)

    def ask(name: str) -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses[name] = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        except (OSError, UnicodeError):
            addresses[name] = []

    threads = []
    for name in addresses:
        thread = threading.Thread(target=ask, args=(name,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more processes are allowed here, which is reported elsewhere
            break
        threads.append(thread)
    deadline = time.monotonic() + LOOK_UP_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(addresses)


def interfaces() -> list:  # type: ignore[type-arg]
    """Every interface with its address (IPv4), MTU in bytes, hardware address, whether it is up, and Mbit/s (or 0)."""
    rows = []
    for _, name in socket.if_nameindex():
        speed = devices.read("/sys/class/net/%s/speed" % name)
        rows.append(
            {
                "name": name,
                "address": node_facts.ipv4_of(name),
                "mtu": struct.unpack_from("i", _asked(name, _SIOCGIFMTU))[0],
                "up": bool(struct.unpack_from("H", _asked(name, _SIOCGIFFLAGS))[0] & _IFF_UP),
                "mac": ":".join("%02x" % byte for byte in _asked(name, _SIOCGIFHWADDR)[2:8]),
                "mbit_s": int(speed) if speed.isdigit() else 0,
            }
        )
    return rows


def _asked(interface: str, request: int) -> bytes:
    """Return what the kernel answers about an interface, behind its name; zeros if it does not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", interface.encode()[:15]))[16:]
        except OSError:
            return bytes(240)


def local_addresses() -> list:  # type: ignore[type-arg]
    """Return all IPv4 addresses of this machine, second ones too, from the kernel's routing trie."""
    addresses, address = [], ""
    for line in devices.read("/proc/net/fib_trie").splitlines():
        words = line.split()
        if words[:1] in (["|--"], ["+--"]):
            address = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"] and address not in addresses:
            addresses.append(address)
    return addresses


def neighbours(peers: list) -> dict:  # type: ignore[type-arg]
    """Return address -> hardware address that this machine sends to, of the peers with a permanent entry."""
    fixed = node_facts.neighbours(flags=4)  # ATF_PERM of linux/if_arp.h
    return {address: card for address, card in fixed.items() if address in peers}


def conf() -> dict:  # type: ignore[type-arg]
    """Configuration files of NCCL that are there, or of RCCL where the GPUs are AMD's: path -> text."""
    name = "rccl" if node_facts.amd_devices() and not node_facts.nvidia_devices() else "nccl"
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.%s.conf" % name)
    return {path: devices.read(path) for path in ("/etc/%s.conf" % name, own) if os.path.isfile(path)}


def digest(folder: str) -> str:
    """Digest of the Python files below a folder; empty when it is not there."""
    import hashlib

    folder = os.path.expanduser(folder)
    hasher = hashlib.blake2b(digest_size=8)
    count = 0
    for where, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            if name.endswith(".py") and count < 5000:
                count += 1
                hasher.update(os.path.relpath(os.path.join(where, name), folder).encode() + b"\0")
                hasher.update(devices.read(os.path.join(where, name)).encode() + b"\0")
    return hasher.hexdigest() if count else ""
