"""System calls for namespaces and mounts that Python has no function for, or only since 3.12. Linux."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_PR_SET_PDEATHSIG = 1
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8916, 0x891C, 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check_syscall_result(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def unshare_namespaces(flags: int) -> None:
    """Move this process into new namespaces."""
    _check_syscall_result(_libc.unshare(ctypes.c_int(flags)), "unshare")


def fork_into(flags: int) -> int:
    """Fork, with the child in new namespaces; in a new PID namespace it is process 1.

    The process must have one thread. `unshare_namespaces` could not do this: it moves only later children into the PID
    namespace.
    """
    number = _SYS_CLONE.get(os.uname().machine)
    if number is None:
        raise OSError(f"the sandbox does not know the clone system call of {os.uname().machine}")
    pid = _libc.syscall(
        ctypes.c_long(number), ctypes.c_ulong(flags | signal.SIGCHLD), None, None, None, ctypes.c_ulong(0)
    )
    return _check_syscall_result(pid, "clone")


def set_parent_kill_signal() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def mount_file_system(source: str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    """Attach a file system; the flags are those of the system call."""
    data = options.encode() or None
    done = _libc.mount(source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), data)
    _check_syscall_result(done, f"mount {target}")


def bind_mount(source: Path, target: Path) -> None:
    """Bind-mount `source` at `target`."""
    mount_file_system(str(source), target, "", MS_BIND | MS_REC)


def map_ids(inside_uid: int, inside_gid: int, outside_uid: int, outside_gid: int) -> None:
    """Fill in the id maps of the user namespace that this process has just entered: one user, one group."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside_uid} {outside_uid} 1")
    Path("/proc/self/gid_map").write_text(f"{inside_gid} {outside_gid} 1")


def enable_interface(name: str, address: str | None = None, netmask: str | None = None) -> None:
    """Give an interface an address and switch it on; saves a process per host compared with ip(8)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for request, text in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, netmask)):
            if text is not None:
                family = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))
                fcntl.ioctl(sock, request, struct.pack("16s16s", name.encode(), family))
        answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16s16x", name.encode()))
        (flags,) = struct.unpack_from("=H", answer, 16)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("=16sH14x", name.encode(), flags | _IFF_UP))
