"""The first process of a virtual host: mounts the host's files, starts its SSH server, and reaps its processes."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from dtctl.sandbox import kernel, slurm

SSHD = "/usr/sbin/sshd"
TMP = Path("/tmp")  # noqa: S108 - each host has its own
NAMESPACES = kernel.CLONE_NEWNET | kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """Configuration that a host needs to start."""

    name: str
    address: str
    netmask: str
    state: Path
    uid: int
    """User id of the login user on the machine around the sandbox."""
    gid: int
    rootless: bool


def main(host: HostConfig, go_fd: int) -> None:
    """Run as process 1 of `host`; never returns. Waits for its cable before it begins."""
    try:
        kernel.set_parent_kill_signal()
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if not os.read(go_fd, 1):
            os._exit(1)  # the keeper has ended before it connected the cable
        os.close(go_fd)
        _set_host_name(host)
        _mount_host_folders(host)
        _configure_network(host)
        start_sshd(host)
        if slurm.build_config_path(host.state).exists():
            slurm.start_daemon(host.state, host.name)
        _reap_forever()
    except BaseException:  # noqa: BLE001 - nothing above could handle it: this is the host's init
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
    os._exit(1)


def _set_host_name(host: HostConfig) -> None:
    import socket

    socket.sethostname(host.name)


def _mount_host_folders(host: HostConfig) -> None:
    """The machine's own files, with this host's own in the places that matter."""
    state = host.state
    kernel.mount_file_system("none", Path("/"), "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount_file_system("proc", Path("/proc"), "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount_file_system("shm", Path("/dev/shm"), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=1777")  # noqa: S108
    kernel.bind_mount(state / "hosts" / host.name, state / "self")
    kernel.mount_file_system("none", state / "hosts", "tmpfs", 0, "size=4k,mode=0700")
    _own_etc(state / "self" / "etc")
    _own_tmp(_list_needed_folders(state))
    if Path("/run/sshd").is_dir() or os.access("/run", os.W_OK):
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)


def _own_etc(own: Path) -> None:
    """Mount the files of `own` over those of the same name in /etc.

    By an overlay where the kernel has it. A bind mount over a single file is lost when another program replaces
    that file (as useradd does with /etc/passwd), and the host's users would be back in the machine's homes.
    """
    try:
        kernel.mount_file_system("overlay", Path("/etc"), "overlay", 0, f"lowerdir={own}:/etc")
    except OSError:
        for path in own.iterdir():
            if Path("/etc", path.name).exists():
                kernel.bind_mount(path, Path("/etc", path.name))


def _own_tmp(needed: list[Path]) -> None:
    """Mount an empty /tmp that contains only those folders of the machine's /tmp that the host needs."""
    # The user's TMPDIR is not used: it is a folder of the machine like any other.
    tmp = TMP.resolve()
    below = [path for path in needed if tmp in path.parents]
    outermost = [path for path in below if not any(other in path.parents for other in below)]
    held = {path: os.open(path, os.O_PATH) for path in outermost}
    kernel.mount_file_system("tmp", tmp, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=1777")
    for path, fd in held.items():
        path.mkdir(parents=True)
        kernel.bind_mount(Path(f"/proc/self/fd/{fd}"), path)
        os.close(fd)


def _list_needed_folders(state: Path) -> list[Path]:
    """Folders that a host uses: its own, and those of the Python that runs dtctl."""
    folders = (state, Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2], *map(Path, sys.path))
    return [path for path in dict.fromkeys(folder.resolve() for folder in folders) if path.is_dir()]


def _configure_network(host: HostConfig) -> None:
    kernel.enable_interface("lo")
    kernel.enable_interface("eth0", host.address, host.netmask)
    if host.rootless:  # its sshd does not run as root, and has to use port 22
        Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("22")


def start_sshd(host: HostConfig) -> int:
    """Start the host's SSH server; return its process id in the host's namespace."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        if host.rootless:
            # As root, sshd requires the right to change its groups; as an ordinary user it does not try to change them.
            kernel.unshare_namespaces(kernel.CLONE_NEWUSER)
            kernel.map_ids(host.uid, host.gid, 0, 0)
        folder = host.state / "self" / "ssh"
        log = os.open(folder / "sshd.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, fd in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, fd)
        home = str(host.state / "self" / "home")
        os.chdir(home)
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        os.execve(SSHD, [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], {"PATH": path, "HOME": home})
    finally:
        os._exit(127)


def _reap_forever() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.pause()  # the namespace has no process left; the host counts as up, like a machine without a server
