"""What a node says about itself before a job starts on it. Stdlib only, Python 3.8; nothing is installed or changed.

The C module `_socket` is used instead of `socket`, whose import takes longer than everything done here.
"""

from __future__ import annotations

import _socket
import errno
import fcntl
import os
import struct
import sys
import time

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the primary IPv4 address of an interface


def hello(workdir: str, ports: list[int]) -> dict:  # type: ignore[type-arg]  # typing is slow to import
    """The node's answer to `hello`.

    Args:
        workdir: absolute path of the folder that dtctl may write to.
        ports: candidates for the rendezvous, in order of preference; empty on all nodes but the head.
    """
    return {
        "op": "hello",
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "hostname": _socket.gethostname(),
        "workdir": workdir,
        "pid": os.getpid(),
        "cpus": os.cpu_count(),
        "gpus": count_gpus(),
        "address": server_address(),
        "port": first_free(ports),
        "time": time.time(),
    }


def count_gpus() -> int:
    """NVIDIA devices of this machine, by their device files; 0 without any."""
    try:
        return sum(1 for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())
    except OSError:
        return 0


def server_address() -> str:
    """This node's own address on the way that the control machine came by; empty when not known."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


def first_free(ports: list[int]) -> int:
    """The first port that nothing listens on; 0 when all are taken or none was given.

    The candidates lie outside the range from which the kernel picks ports by itself, so a free one is not handed to
    somebody else between this look and its use.
    """
    for port in ports:
        probe = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        try:
            probe.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            probe.bind(("0.0.0.0", port))  # noqa: S104 - bound, never listened on
            return port
        except OSError:
            continue
        finally:
            probe.close()
    return 0


def interface_towards(peer: str) -> str:
    """Name of the interface that packets to `peer` leave by; on `peer` itself, the one that has the address.

    Asks the kernel's routing table by connecting a UDP socket, which sends nothing. Empty when there is no route, or
    when the address found is not the primary one of any interface.
    """
    probe = _socket.socket(_socket.AF_INET6 if ":" in peer else _socket.AF_INET, _socket.SOCK_DGRAM)
    try:
        probe.connect((peer, 9))
        address = probe.getsockname()[0]
    except OSError:
        return ""
    finally:
        probe.close()
    return _interface_of_v6(address) if ":" in address else _interface_of_v4(address)


def _interface_of_v4(address: str) -> str:
    probe = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    try:
        for _, name in _socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # no IPv4 address on this one
            if _socket.inet_ntoa(answer[20:24]) == address:
                return str(name)
    finally:
        probe.close()
    return ""


def _interface_of_v6(address: str) -> str:
    wanted = _socket.inet_pton(_socket.AF_INET6, address.split("%", maxsplit=1)[0]).hex()
    try:
        with open("/proc/net/if_inet6") as table:
            for line in table:
                words = line.split()
                if words[0] == wanted:
                    return words[5]
    except OSError:
        pass
    return ""


def code_of(exc: OSError) -> str:
    """A word for the control machine to choose its hint by."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk-full"
    return "permission" if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else "os"


def describe(exc: OSError) -> str:
    """What the system refused, and where."""
    return f"{exc.strerror}: {exc.filename}" if exc.filename else str(exc.strerror)
