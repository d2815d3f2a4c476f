"""Facts about the machine that this runs on: its interfaces and ports, and the processes on it.

Used on the control machine, in the workers and, sent along with the supervisor and the doctor's probe, on nodes. Stdlib
only, Python 3.8.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST_PORT = 20000
LAST_PORT = 32767
"""The ports are below Linux's ephemeral range (net.ipv4.ip_local_port_range, 32768-60999 by default). The kernel does
not assign them, so a free port stays free unless a program requests exactly this one."""
AVOIDED_PORTS = (29400, 29500)
"""Defaults of torchrun's rendezvous and of MASTER_PORT: most likely taken, or about to be."""
PORT_CANDIDATES = 16


def compute_port_candidates(seed: str) -> list[int]:
    """Ports to try, in order of preference; the same for the same seed."""
    import hashlib

    ports: list[int] = []
    counter = 0
    while len(ports) < PORT_CANDIDATES:
        digest = hashlib.blake2b(("%s/%d" % (seed, counter)).encode(), digest_size=8).digest()
        port = FIRST_PORT + int.from_bytes(digest, "big") % (LAST_PORT - FIRST_PORT + 1)
        if port not in AVOIDED_PORTS and port not in ports:
            ports.append(port)
        counter += 1
    return ports


def find_free_port(ports: list[int]) -> int:
    """Return the first port that nothing listens on; 0 when all are taken or none was given."""
    for port in ports:
        probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("0.0.0.0", port))  # noqa: S104 - bound, never listened on
            return port
        except OSError:
            continue
        finally:
            probe.close()
    return 0


def has_socket_at(port: int) -> bool:
    """Return whether a TCP socket of this machine listens at a port, or a connection to it exists or has just ended."""
    end = ":%04X" % port
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in read_system_file(path).splitlines()[1:]:
            if any(address.endswith(end) for address in line.split()[1:3]):
                return True
    return False


def find_address_towards(peer: str) -> str:
    """This machine's address on the way to a numeric address; empty when there is no route.

    Asks the kernel's routing table by connecting a UDP socket, which sends nothing.
    """
    probe = socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
    except OSError:
        return ""
    finally:
        probe.close()


def find_interface_of(address: str) -> str:
    """Return the name of the interface with this primary address; empty when there is none."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.split("%", 1)[0]).hex()
        rows = [row.split() for row in read_system_file("/proc/net/if_inet6").splitlines()]
        return next((row[5] for row in rows if row[0] == packed), "")
    names = [str(name) for _, name in socket.if_nameindex()] if address else []
    return next((name for name in names if read_interface_ipv4(name) == address), "")


def read_interface_ipv4(interface: str) -> str:
    """Primary IPv4 address of an interface; empty when it has none."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        request = struct.pack("256s", interface.encode()[:15])
        return str(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]))  # SIOCGIFADDR
    except OSError:
        return ""
    finally:
        probe.close()


def find_interface_towards(peer: str) -> str:
    """Return the name of the interface that packets to `peer` leave by; on `peer` itself, the one that has the address.

    Empty when there is no route, or when the address on the way is not the primary one of any interface.
    """
    return find_interface_of(find_address_towards(peer))


def read_arp_neighbours(flags: int = 0) -> dict:  # type: ignore[type-arg]
    """IPv4 address -> hardware address of machines that this one has sent to; with `flags`, of rows that have them."""
    addresses = {}
    for line in read_system_file("/proc/net/arp").splitlines()[1:]:
        row = line.split()
        if len(row) > 3 and int(row[2], 16) & flags == flags and row[3].strip("0:"):
            addresses[row[0]] = row[3]
    return addresses


def read_system_file(path: str) -> str:
    """Return the text of a small file of the kernel's; empty when it is not there."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def detect_roce_address(port: str) -> str:
    """Return whether an RDMA port has an address for RoCE v2 over IPv4: yes, no, or empty if unknown.

    Args:
        port: its folder below /sys/class/infiniband.
    """
    kinds = os.path.join(port, "gid_attrs", "types")
    try:
        numbers = os.listdir(kinds)
    except OSError:
        return ""
    # An unused entry cannot be read; an IPv4 address has the form of an IPv6 one.
    ready = [number for number in numbers if read_system_file(os.path.join(kinds, number)).strip() == "RoCE v2"]
    return (
        "yes"
        if any(":ffff:" in read_system_file(os.path.join(port, "gids", number))[:30] for number in ready)
        else "no"
    )


def list_nvidia_devices() -> list:  # type: ignore[type-arg]
    """Device files of NVIDIA's GPUs that this process may open, by number.

    In a job of Slurm all of a node's are there, and the control group lets a process open its own.
    """
    devices = [name for name in _list_folder("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    return [
        name for name in sorted(devices, key=lambda name: int(name[6:])) if _can_open_device(os.path.join("/dev", name))
    ]


def list_amd_devices() -> list:  # type: ignore[type-arg]
    """Device files of AMD's GPUs that this process may open; both the driver's own and theirs are needed."""
    if not _can_open_device("/dev/kfd"):
        return []
    names = []
    for name in sorted(_list_folder("/dev/dri")):
        if not name.startswith("renderD"):
            continue
        vendor = read_system_file("/sys/class/drm/%s/device/vendor" % name).strip()
        if vendor == "0x1002" and _can_open_device("/dev/dri/" + name):
            names.append(name)
    return names


def check_rdma_access(device: str) -> str:
    """Return whether this process may open an RDMA device: yes, no, or empty if unknown.

    In a container the kernel's list has devices without files in the container; NCCL cannot use them.
    """
    found = _list_folder("/sys/class/infiniband/%s/device/infiniband_verbs" % device)
    if not found:
        return ""
    return "yes" if any(_can_open_device("/dev/infiniband/" + name) for name in found) else "no"


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that a process with these variables can use, each by a worker of its own; 0 without any.

    Count the GPUs of NVIDIA that can be opened and that CUDA_VISIBLE_DEVICES or Slurm shows; 1 if some are divided
    (MIG), since CUDA shows only one instance to a process. If there are none, count the GPUs of AMD.
    """
    count = len(list_nvidia_devices())
    if count:
        gpus = "/proc/driver/nvidia/capabilities"
        parts = [name for gpu in _list_folder(gpus) for name in _list_folder(os.path.join(gpus, gpu, "mig"))]
        if any(name.startswith("gi") for name in parts):
            count = 1
    else:
        count = len(list_amd_devices())
    return min(count, count_visible_gpus(environ, count))


def count_visible_gpus(environ: Mapping[str, str], count: int) -> int:
    """Return how many of `count` GPUs variables leave to a process."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ:
            entries = [entry.strip() for entry in environ[name].split(",")]
            hidden = [place for place, entry in enumerate(entries) if entry in ("", "-1", "NoDevFiles")]
            count = min(count, hidden[0] if hidden else len(entries))  # later entries are hidden, too
    allocated = environ.get("SLURM_GPUS_ON_NODE", "")
    return min(count, int(allocated)) if allocated.isdigit() and int(allocated) else count


def count_usable_cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than its control groups grant it, at least 1.

    A container with `--cpus 2` on a machine of 64 cores still sees 64; torch starts 64 threads there.
    """
    quota = read_cpu_quota()
    return count_bound_cores() if quota < 0 else max(1, min(count_bound_cores(), int(quota)))


def count_bound_cores() -> int:
    """Cores that this process is bound to. Two processors of one core count once, as they do for torch."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    topology = "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list"
    return len({read_system_file(topology % processor).strip() or processor for processor in processors})


def read_cpu_quota() -> float:
    """Return the processor time that this process's control groups (v1 or v2) grant, in processors; -1: no limit."""
    quotas = [_quota_of(folder) for folder in list_control_groups("cpu")]
    return min((quota for quota in quotas if quota >= 0), default=-1)


def _quota_of(folder: str) -> float:
    """Return the limit of one control group."""
    words = read_system_file(os.path.join(folder, "cpu.max")).split()
    if len(words) != 2:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [read_system_file(os.path.join(folder, name)).strip() for name in names]
    quota, period = words
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else -1


def list_control_groups(controller: str) -> list:  # type: ignore[type-arg]
    """Folders of the control groups that hold this process, innermost first, of both versions."""
    folders = []
    for line in read_system_file("/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif controller in names.split(","):
            roots = ["/sys/fs/cgroup/" + controller, "/sys/fs/cgroup/" + names]
        else:
            continue
        # In a container the path may be that of the machine outside, and the group itself lies at the root.
        parts = path.strip("/").split("/") if path.strip("/") else []
        for root in roots:
            folders += [os.path.join(root, *parts[:count]) for count in range(len(parts), -1, -1)]
    return folders


def _list_folder(folder: str) -> list:  # type: ignore[type-arg]
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _can_open_device(path: str) -> bool:
    """Return whether this process may use a device; a broken one counts as usable, so that it is reported."""
    try:  # without waiting for a driver that is asleep; the control group decides before that
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as exc:
        return exc.errno not in (errno.EACCES, errno.EPERM, errno.ENOENT)
    return True


def read_boot_id() -> str:
    """Return the id of this boot of the machine; empty where the system has none."""
    return read_system_file("/proc/sys/kernel/random/boot_id").strip()


def read_process_stat(pid: int | str) -> tuple[str, int, int] | None:
    """Return state letter, parent id, and start in clock ticks since boot of a process; None when there is none.

    The state is the kernel's: R runs, S sleeps, D waits for a disk, T is stopped, Z has ended and was not waited for.
    The kernel reports Z also for a process with only its first thread ended; this one counts as running (R).
    """
    try:
        with open("/proc/%s/stat" % pid, "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    state, threads = fields[0].decode(), int(fields[17])
    return "R" if state == "Z" and threads > 1 else state, int(fields[1]), int(fields[19])


def read_process_state(pid: int) -> str:
    """Return the kernel's letter for what a process does; empty when there is none."""
    fields = read_process_stat(pid)
    return "" if fields is None else fields[0]


def start_ticks(pid: int) -> int:
    """Return the start of a process in clock ticks since boot; 0 after its end, -1 where it is not known."""
    fields = read_process_stat(pid)
    if fields is None:
        return 0 if os.path.exists("/proc/self/stat") else -1
    return 0 if fields[0] in "ZX" else fields[2]


def process_start() -> float:
    """Return when this process began, on the monotonic clock; needed to count the time of the imports."""
    ticks = start_ticks(os.getpid())
    if ticks <= 0:  # the system has no record of it; this process has computed all the time, without waiting
        return time.monotonic() - time.process_time()
    # The kernel counts from boot, sleep included; the monotonic clock leaves sleep out.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def convert_to_epoch_time(moment: float) -> float:
    """Return a time on the monotonic clock in seconds since the epoch."""
    return time.time() - (time.monotonic() - moment)


def launch_time() -> float:
    """Return when this process began, in seconds since the epoch."""
    return convert_to_epoch_time(process_start())


def set_process_attribute(option: int, value: int) -> bool:
    """Change an attribute of this process (prctl(2), which Python has no function for); whether the kernel did so."""
    import ctypes

    try:
        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (AttributeError, OSError):  # not Linux
        return False
