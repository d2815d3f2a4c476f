"""What a node's tools and kernel say of its GPUs and RDMA ports; their words, which others read. Stdlib, Python 3.8."""

from __future__ import annotations

import os
import subprocess

from dtctl.supervisor import facts as basic

TOOL_LIMIT_S = 8.0
RDMA = "/sys/class/infiniband"
_GPU = "index,name,memory.used,memory.total,driver_version,ecc.errors.uncorrected.volatile.total"


def devices() -> dict:  # type: ignore[type-arg]
    """`gpus` (device files), `rdma` ports, and the words of nvidia-smi and the kernel; empty without GPUs."""
    found = {"gpus": basic.count_gpus(), "rdma": rdma(), "remapped": "", "nvlink": "", "topology": "", "xid": ""}
    found["gpu"] = tool(["nvidia-smi", "--query-gpu=" + _GPU, "--format=csv,noheader,nounits"])
    if not found["gpu"]:
        return found
    asked = "--query-remapped-rows=gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
    found["remapped"] = tool(["nvidia-smi", asked, "--format=csv,noheader"])
    found["nvlink"] = tool(["nvidia-smi", "nvlink", "--status"])
    found["topology"] = tool(["nvidia-smi", "topo", "-m"])
    # Without the right to read the kernel's messages nothing is said, and nothing is concluded from that.
    lines = tool(["dmesg"]).splitlines()
    found["xid"] = "\n".join(line for line in lines if "NVRM: Xid" in line)[-8192:]
    return found


def tool(argv: list) -> str:  # type: ignore[type-arg]
    """What a program prints; empty when it is not there or does not end."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_LIMIT_S, check=False)
        return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        return ""


def rdma() -> list:  # type: ignore[type-arg]
    """Ports of RDMA devices, as the kernel shows them."""
    found = []
    for device in sorted(os.listdir(RDMA)) if os.path.isdir(RDMA) else []:
        for port in sorted(os.listdir(os.path.join(RDMA, device, "ports"))):
            folder = os.path.join(RDMA, device, "ports", port)
            said = {name: read(os.path.join(folder, name)) for name in ("state", "rate", "link_layer")}
            found.append({"device": device, "port": port, **said})
    return found


def read(path: str) -> str:
    """What a small file says; empty when it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read(1 << 16).strip()
    except OSError:
        return ""
