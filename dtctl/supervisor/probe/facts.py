"""Facts of a node for the doctor, without any change on the node. Stdlib only, Python 3.8."""

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
from dtctl.supervisor.messages.probe import QueryFacts
from dtctl.supervisor.probe import devices, limits, places

_SIOCGIFFLAGS = 0x8913  # This and the next numbers are from linux/sockios.h.
_SIOCGIFMTU = 0x8921
_SIOCGIFHWADDR = 0x8927
_IFF_UP = 1
WATCHED = (
    *("NCCL_", "RCCL_", "TORCH_", "GLOO_", "UCX_", "FI_", "HSA_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "MASTER_", "PYTORCH_", "LD_", "PYTHONPATH"),
)
LOOK_UP_LIMIT_S = 2.0


def gather_probe_facts(request: QueryFacts) -> dict:  # type: ignore[type-arg]
    """Return all facts that need no other node."""
    begun = time.monotonic()
    hostname = socket.gethostname()
    workdir = os.path.expanduser(request.workdir)
    env = {**os.environ, **request.env}
    return {
        "hostname": hostname,
        "user": _read_user_name(),
        "time": time.time(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        **limits.gather_process_limits(),
        **places.gather_place_facts(workdir, env),
        "looked_up": resolve_host_names([*request.names, hostname]),
        "interfaces": list_network_interfaces(),
        "addresses": list_local_addresses(),
        "reached_at": basic.find_server_address(),
        "ways": {peer: node_facts.find_interface_towards(peer) for peer in request.peers},
        "neighbours": list_fixed_neighbours(request.peers),
        "missing": [path for path in request.paths if not os.path.exists(os.path.expanduser(path))],
        "env": {name: value for name, value in os.environ.items() if name.startswith(WATCHED)},
        "conf": read_nccl_configs(),
        **devices.gather_device_facts(),
        "code": compute_source_digest(request.code) if request.code else "",
        "took_s": time.monotonic() - begun,
    }


def _read_user_name() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError):
        return str(os.getuid())


def resolve_host_names(names: list) -> dict:  # type: ignore[type-arg]
    """Return addresses by name; an empty list for an unknown name, None without an answer in time."""
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
        except RuntimeError:  # The limit of processes is reached, which another fact shows.
            break
        threads.append(thread)
    deadline = time.monotonic() + LOOK_UP_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(addresses)


def list_network_interfaces() -> list:  # type: ignore[type-arg]
    """Return each interface with its IPv4 address, MTU in bytes, hardware address, state and Mbit/s (0: not known)."""
    rows = []
    for _, name in socket.if_nameindex():
        speed = devices.read_small_file("/sys/class/net/%s/speed" % name)
        rows.append(
            {
                "name": name,
                "address": node_facts.read_interface_ipv4(name),
                "mtu": struct.unpack_from("i", _query_interface(name, _SIOCGIFMTU))[0],
                "up": bool(struct.unpack_from("H", _query_interface(name, _SIOCGIFFLAGS))[0] & _IFF_UP),
                "mac": ":".join("%02x" % byte for byte in _query_interface(name, _SIOCGIFHWADDR)[2:8]),
                "mbit_s": int(speed) if speed.isdigit() else 0,
            }
        )
    return rows


def _query_interface(interface: str, request: int) -> bytes:
    """Return the kernel's answer about an interface, without the name; zeros if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", interface.encode()[:15]))[16:]
        except OSError:
            return bytes(240)


def list_local_addresses() -> list:  # type: ignore[type-arg]
    """Return all IPv4 addresses of this machine, including secondary ones, from the kernel's routing trie."""
    addresses, address = [], ""
    for line in devices.read_small_file("/proc/net/fib_trie").splitlines():
        words = line.split()
        if words[:1] in (["|--"], ["+--"]):
            address = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"] and address not in addresses:
            addresses.append(address)
    return addresses


def list_fixed_neighbours(peers: list) -> dict:  # type: ignore[type-arg]
    """Return the hardware address of each peer with a permanent entry in this machine's table of neighbours."""
    fixed = node_facts.read_arp_neighbours(flags=4)  # The flag is ATF_PERM of linux/if_arp.h.
    return {address: card for address, card in fixed.items() if address in peers}


def read_nccl_configs() -> dict:  # type: ignore[type-arg]
    """Return the text of each configuration file of NCCL that exists, or of RCCL with AMD's GPUs, by path."""
    name = "rccl" if node_facts.list_amd_devices() and not node_facts.list_nvidia_devices() else "nccl"
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.%s.conf" % name)
    return {path: devices.read_small_file(path) for path in ("/etc/%s.conf" % name, own) if os.path.isfile(path)}


def compute_source_digest(folder: str) -> str:
    """Return a digest of the Python files below a folder; empty if the folder does not exist."""
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
                hasher.update(devices.read_small_file(os.path.join(where, name)).encode() + b"\0")
    return hasher.hexdigest() if count else ""
