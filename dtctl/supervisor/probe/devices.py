"""Output of a node's tools and kernel about its GPUs and RDMA ports, which other code parses. Stdlib, Python 3.8."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from dtctl import node_facts
from dtctl.supervisor.probe import amd

TOOL_LIMIT_S = 8.0
SMI_LIMIT_S = 30.0
"""Seconds for nvidia-smi: without persistence mode, the first call loads the driver for every GPU, which takes up to
half a minute with 8 H100s. So all queries run at the same time, and share the loaded driver."""
AMD_LIMIT_S = 10.0
"""Seconds for each query to AMD's tools; the queries run one after another and need not load the driver."""
RECENT_S = 24 * 3600.0
"""Age in seconds up to which messages of the kernel count: older errors were repaired, or other facts show them."""
RDMA = "/sys/class/infiniband"
_GPU = "index,name,memory.used,memory.total,driver_version,ecc.errors.uncorrected.volatile.total"
_REMAPPED = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
# The bit mask of clock reasons has another name since driver 535, but later drivers accept this name, too.
_STATE = (
    "index,persistence_mode,power.limit,power.default_limit,clocks_throttle_reasons.active,"
    "pcie.link.width.current,pcie.link.width.max,mig.mode.current,ecc.mode.current"
)
_QUERIES = {
    "remapped": ["nvidia-smi", "--query-remapped-rows=" + _REMAPPED, "--format=csv,noheader"],
    "nvlink": ["nvidia-smi", "nvlink", "--status"],
    "topology": ["nvidia-smi", "topo", "-m"],
    "state": ["nvidia-smi", "--query-gpu=" + _STATE, "--format=csv,noheader,nounits"],
    "fabric": ["nvidia-smi", "--query-gpu=index,fabric.state,fabric.status", "--format=csv,noheader"],
}
_XID = "NVRM: Xid"
_AMD = re.compile(r"amdgpu.*(GPU reset|uncorrectable|ring \S+ timeout|fatal error)", re.IGNORECASE)
_KERNEL = (
    ["dmesg", "--time-format", "iso"],
    # On Debian and Ubuntu, only root may run dmesg; the groups adm and systemd-journal may read the journal.
    ["journalctl", "-k", "-b", "--no-pager", "-o", "short-iso", "-n", "20000"],
    ["dmesg"],
)


def gather_device_facts() -> dict:  # type: ignore[type-arg]
    """Return `gpus` (device files), `rdma` ports, and output of the GPUs' tool and the kernel; empty without GPUs.

    `vendor` is nvidia or amd, and decides the tool: nvidia-smi, or amd-smi, or rocm-smi on older systems. `gpu_error`
    is the tool's error message; `xid_source` is the program that printed the kernel's messages, empty if none could.
    """
    nvidia, others = node_facts.list_nvidia_devices(), node_facts.list_amd_devices()
    facts = {
        "gpus": len(nvidia) or len(others),
        "vendor": "",
        "rdma": read_rdma_ports(),
        "gpu": "",
        "gpu_error": "",
        "xid": "",
        "xid_source": "",
    }
    facts.update(dict.fromkeys(_QUERIES, ""))
    if others and not nvidia:
        facts["vendor"] = "amd"
        facts["gpu"], facts["gpu_error"] = amd.format_amd_gpu_rows(others, lambda argv: run(argv, AMD_LIMIT_S))
        facts["state"] = amd.format_amd_gpu_state(others)
        facts["xid"], facts["xid_source"] = read_kernel_errors(time.time())
        return facts
    if not nvidia and not shutil.which("nvidia-smi"):
        return facts
    asked = ["nvidia-smi", "--query-gpu=" + _GPU, "--format=csv,noheader,nounits"]
    with ThreadPoolExecutor(len(_QUERIES) + 2) as pool:
        rows = pool.submit(run, asked, SMI_LIMIT_S)
        messages = pool.submit(read_kernel_errors, time.time())
        said = pool.map(lambda argv: read_tool_output(argv, SMI_LIMIT_S), _QUERIES.values())
        facts.update(zip(_QUERIES, said))  # noqa: B905 - Python 3.8 has no `strict`
    # If one GPU is lost, the tool fails, but its output about the other GPUs counts.
    facts["gpu"], facts["gpu_error"] = rows.result()
    if facts["gpus"] or facts["gpu"]:
        facts["vendor"] = "nvidia"
        facts["xid"], facts["xid_source"] = messages.result()
    return facts


def read_kernel_errors(now: float) -> tuple:  # type: ignore[type-arg]
    """Return the kernel's messages about GPU errors of the last day, and the program that printed them; empty: none."""
    for argv in _KERNEL:
        said, error = run(argv, TOOL_LIMIT_S)
        if said and not error:
            of_gpus = (line for line in said.splitlines() if _XID in line or _AMD.search(line))
            lines = [line for line in of_gpus if now - parse_line_time(line, now) <= RECENT_S]
            return "\n".join(lines)[-8192:], argv[0]
    return "", ""


def parse_line_time(line: str, now: float) -> float:
    """Return the time of a line of the kernel's log, by the clock of `now`; `now` itself if the line has none."""
    try:
        return time.mktime(time.strptime(line[:19], "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        pass
    try:  # This form has seconds since the start of the machine: [ 1234.5].
        return now - float(read_small_file("/proc/uptime").split()[0]) + float(line.partition("[")[2].partition("]")[0])
    except (ValueError, IndexError):
        return now


def read_tool_output(argv: list, limit_s: float = TOOL_LIMIT_S) -> str:  # type: ignore[type-arg]
    """Return the output of a program; empty if it does not exist, fails or does not end in time."""
    said, error = run(argv, limit_s)
    return "" if error else said


def run(argv: list, limit_s: float) -> tuple:  # type: ignore[type-arg]
    """Return the output of a program, even if it fails, and the reason of the failure, empty if it succeeds."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return "", "%s has not ended after %g s" % (argv[0], limit_s)
    except OSError as exc:
        return "", "%s: %s" % (argv[0], exc.strerror)
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode == 0:
        return said, ""
    words = (done.stderr.decode(errors="replace").strip() or said).splitlines()
    return said, "%s ends with status %s: %s" % (argv[0], done.returncode, words[-1] if words else "")


def read_rdma_ports() -> list:  # type: ignore[type-arg]
    """Return the ports of RDMA devices, as the kernel shows them."""
    ports = []
    for device in sorted(os.listdir(RDMA)) if os.path.isdir(RDMA) else []:
        for port in sorted(os.listdir(os.path.join(RDMA, device, "ports"))):
            folder = os.path.join(RDMA, device, "ports", port)
            said = {name: read_small_file(os.path.join(folder, name)) for name in ("state", "rate", "link_layer")}
            roce, verbs = node_facts.detect_roce_address(folder), node_facts.check_rdma_access(device)
            ports.append({"device": device, "port": port, "roce": roce, "verbs": verbs, **said})
    return ports


def read_small_file(path: str) -> str:
    """Return the contents of a small file; empty if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read(1 << 16).strip()
    except OSError:
        return ""
