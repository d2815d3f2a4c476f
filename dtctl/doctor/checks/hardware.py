"""Checks of GPUs, their links, and network cards: broken, busy, or different from those of other nodes. Pure.

The checks read the output of nvidia-smi, amd-smi, dmesg, AMD's driver and /sys/class/infiniband; they conclude nothing
from a missing tool.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dtctl.doctor.checks.node import build_shared_finding, compare_node_values
from dtctl.doctor.findings import Finding
from dtctl.doctor.node_report import NodeReport
from dtctl.printable import format_count

RAN = (
    *("gpus", "gpu-xid", "gpu-ecc", "gpu-driver", "gpu-model", "gpu-links", "gpu-busy"),
    *("gpu-power", "gpu-clocks", "gpu-pcie", "gpu-mig", "rdma", "link-speed"),
)
XID = {
    13: "graphics engine exception, mostly of the program",
    31: "memory page fault, mostly of the program",
    48: "double-bit ECC error",
    63: "row remapping",
    64: "row remapping has failed",
    74: "NVLink error",
    79: "it has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "a context switch has timed out",
    119: "its firmware (GSP) does not answer",
    120: "its firmware (GSP) has failed",
    140: "unrecovered ECC error",
    **dict.fromkeys(range(144, 151), "NVLink error"),
    154: "it must be reset, or the node restarted",
}
"""Numbers of errors of the GPU's hardware. Source: https://docs.nvidia.com/deploy/xid-errors/"""
DEADLY_XID = (48, 64, 74, 79, 95, 119, 120, 140, 154)
SLOWED = {
    0x08: "the hardware slows it down",
    0x40: "it is too hot",
    0x80: "the power supply limits it",
    0x20: "the driver slows it down because of heat",
}
"""Bits of clocks_event_reasons.active that are faults; idleness and the power cap under load are none."""
HELD = {
    "low": "its driver is set to the lowest clocks",
    "manual": "its clocks were set manually",
    "profile_min_sclk": "its driver is set to the lowest clocks",
    "profile_min_mclk": "its driver is set to the lowest memory clocks",
    "profile_standard": "its driver keeps the clocks fixed, for profiling",
}
"""Levels of amdgpu's power_dpm_force_performance_level other than auto, high and the peak levels."""
_XID = re.compile(r"NVRM: Xid \((?P<gpu>[^)]*)\): (?P<number>\d+)")
_ROW = re.compile(r"GPU\d+\s")


def check_hardware(reports: Sequence[NodeReport], slots: Mapping[str, int]) -> Iterator[Finding]:
    """Yield findings about GPUs, RDMA ports and network cards.

    Args:
        reports: the nodes.
        slots: node -> number of its workers, for nodes whose number is in the spec.
    """
    yield from _check_gpu_counts(reports, slots)
    yield from _check_gpu_drivers(reports)
    yield from _check_gpu_health(reports)
    gpus = {node.name: rows for node in reports if (rows := parse_gpu_rows(node.facts["gpu"]))}
    yield from compare_node_values(
        "gpu-driver",
        {name: rows[0].get("driver", "") for name, rows in gpus.items()},
        "install the same driver on every node",
        what="driver of the GPUs",
        status="warn",
    )
    yield from compare_node_values(
        "gpu-model",
        {
            name: ", ".join(f"{n} x {model}" for model, n in Counter(r["name"] for r in rows).items())
            for name, rows in gpus.items()
        },
        "use one kind of GPU per job, since all workers wait for the slowest GPU",
        what="kind of GPU",
        status="warn",
    )
    yield from _check_nvlinks(reports)
    yield from _check_gpu_state(reports)
    yield from build_shared_finding(
        "gpu-busy",
        {n.name: text for n in reports if (text := ", ".join(find_busy_gpus(n.facts["gpu"])))},
        "nvidia-smi --query-compute-apps=pid,used_memory --format=csv (amd-smi process on AMD); end processes that "
        "a killed job has left",
        summary="GPU memory is in use already",
        status="warn",
    )
    yield from _check_network_hardware(reports)


def _check_gpu_counts(reports: Sequence[NodeReport], slots: Mapping[str, int]) -> Iterator[Finding]:
    fix = "if the node should have a GPU, read `dmesg | grep Xid` (79: it has fallen off the bus) and `nvidia-smi -L`"
    few = {
        n.name: f"{format_count(n.facts['gpus'], 'GPU')} for {format_count(slots[n.name], 'worker')}"
        for n in reports
        if n.name in slots and 0 < n.facts["gpus"] < slots[n.name]
    }
    yield from build_shared_finding("gpus", few, f"lower cluster.slots; {fix}", summary="fewer GPUs than workers")
    if not few:
        counts = {n.name: str(n.facts["gpus"]) for n in reports}
        yield from compare_node_values("gpus", counts, fix, what="number of GPUs", status="warn")


def _check_gpu_drivers(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about GPUs that have device files, but whose driver does not answer or does not list them."""
    yield from build_shared_finding(
        "gpus",
        {n.name: n.facts["gpu_error"] for n in reports if n.facts["gpus"] and n.facts["gpu_error"]},
        "run it there; a GPU that is lost needs a reset or a restart of the node; an nvidia-smi that does not end may "
        "only need the driver to stay awake: nvidia-smi -pm 1, or nvidia-persistenced",
        summary="the GPU tool fails",
    )
    yield from build_shared_finding(
        "gpus",
        {
            n.name: f"{listed} of {n.facts['gpus']}"
            for n in reports
            if not n.facts["gpu_error"] and 0 < (listed := len(parse_gpu_rows(n.facts["gpu"]))) < n.facts["gpus"]
        },
        "read `dmesg | grep Xid` (79: it has fallen off the bus); leave the node out (cluster.nodes) until it "
        "was restarted",
        summary="the driver lists fewer GPUs than there are device files",
    )
    yield from build_shared_finding(
        "gpu-links",
        {n.name: text for n in reports if (text := ", ".join(find_fabric_errors(n.facts["fabric"])))},
        "systemctl status nvidia-fabricmanager; its version must be the driver's; CUDA fails with error 802 until then",
        summary="the NVSwitch fabric is not ready",
    )


def _check_gpu_health(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    xids = {n.name: found for n in reports if (found := find_xid_errors(n.facts["xid"]))}
    for status, deadly in (("fail", True), ("warn", False)):
        yield from build_shared_finding(
            "gpu-xid",
            {
                name: ", ".join(f"{gpu}: Xid {number}, {XID[number]}" for gpu, number in found)
                for name, found in xids.items()
                if any(number in DEADLY_XID for _, number in found) == deadly
            },
            "leave the node out (cluster.nodes) and reset the GPU or restart the node; dmesg | grep -i xid",
            summary="the kernel reports GPU errors",
            status="fail" if status == "fail" else "warn",
        )
    yield from build_shared_finding(
        "gpu-xid",
        {
            n.name: text
            for n in reports
            if n.facts["vendor"] == "amd" and (text := "; ".join(find_amd_errors(n.facts["xid"])))
        },
        "leave the node out (cluster.nodes) and restart it; dmesg | grep -i amdgpu; amd-smi metric --ecc "
        "(rocm-smi --showrasinfo)",
        summary="the kernel reports GPU errors",
    )
    ecc = {n.name: text for n in reports if (text := ", ".join(find_ecc_errors(n.facts["gpu"], n.facts["remapped"])))}
    yield from build_shared_finding(
        "gpu-ecc",
        ecc,
        _of_maker(
            reports,
            ecc,
            "nvidia-smi --gpu-reset -i INDEX when the GPU is idle; nvidia-smi -q -d ECC,ROW_REMAPPER",
            "amd-smi reset --gpureset --gpu INDEX when the GPU is idle; amd-smi bad-pages, amd-smi metric --ecc",
        ),
        summary="GPU memory has errors that were not corrected, or waits for a reset",
    )


def _check_nvlinks(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about GPUs with fewer NVLinks than others; some models have unused links on every GPU."""
    active = {(n.name, gpu): links for n in reports for gpu, links in count_active_nvlinks(n.facts["nvlink"]).items()}
    usual = Counter(active.values()).most_common(1)
    few: dict[str, str] = {}
    for (node, gpu), links in active.items():
        if links < usual[0][0]:
            few[node] = few.get(node, "") + f"GPU {gpu} has {links} of {usual[0][0]} NVLinks; "
    yield from build_shared_finding(
        "gpu-links",
        {node: text.rstrip("; ") for node, text in few.items()},
        "nvidia-smi nvlink --status; dmesg | grep -iE 'nvlink|xid'; is nvidia-fabricmanager running?",
        summary="NVLinks are down",
        status="warn",
    )
    if not few:
        few = {
            n.name: text for n in reports if (text := ", ".join(find_missing_links(n.facts["gpu"], n.facts["nvlink"])))
        }
        yield from build_shared_finding(
            "gpu-links",
            few,
            "nvidia-smi nvlink --status; is nvidia-fabricmanager running? a virtual machine may be given fewer",
            summary="GPUs have fewer NVLinks than their kind",
            status="warn",
        )
    if not few:
        maps = {n.name: text for n in reports if (text := parse_gpu_topology(n.facts["topology"]))}
        yield from compare_node_values(
            "gpu-links",
            maps,
            "nvidia-smi topo -m shows which; leave such nodes out",
            what="GPU topology",
            status="warn",
        )


def _check_gpu_state(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about the settings and the state of each GPU, from its driver."""
    states = {n.name: parse_gpu_states(n.facts["state"]) for n in reports}
    few = {
        node: ", ".join(f"GPU {row['index']} at {row['limit']} of {row['usual']} W" for row in rows if is_capped(row))
        for node, rows in states.items()
    }
    yield from build_shared_finding(
        "gpu-power",
        {node: text for node, text in few.items() if text},
        _of_maker(reports, few, "nvidia-smi -i INDEX -pl WATTS", "amd-smi set --gpu INDEX --power-cap WATTS (as root)")
        + " raises the limit, if the site's power and cooling allow it",
        summary="the power of a GPU is limited below the default of its board",
        status="warn",
    )
    slowed = {
        node: ", ".join(f"GPU {row['index']}: {text}" for row in rows for text in explain_low_clocks(row["reasons"]))
        for node, rows in states.items()
    }
    yield from build_shared_finding(
        "gpu-clocks",
        {node: text for node, text in slowed.items() if text},
        _of_maker(
            reports,
            slowed,
            "nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE; look at fans, inlet temperature and power supplies",
            "amd-smi set --gpu INDEX --perf-level AUTO (rocm-smi --setperflevel auto), as root",
        ),
        summary="a GPU is slowed down",
        status="warn",
    )
    narrow = {
        node: ", ".join(
            f"GPU {row['index']} x{row['width']} of x{row['widest']}"
            for row in rows
            if row["width"].isdigit() and row["widest"].isdigit() and int(row["width"]) < int(row["widest"])
        )
        for node, rows in states.items()
    }
    yield from build_shared_finding(
        "gpu-pcie",
        {node: text for node, text in narrow.items() if text},
        "reseat the board or its riser; lspci -vv shows LnkSta beside LnkCap",
        summary="the PCIe link of a GPU is narrower than it could be",
        status="warn",
    )
    cut = {
        node: ", ".join(f"GPU {row['index']}" for row in rows if row["mig"] == "Enabled")
        for node, rows in states.items()
    }
    yield from build_shared_finding(
        "gpu-mig",
        {node: text for node, text in cut.items() if text},
        "a worker can use one instance, and NCCL none together with others: nvidia-smi -mig 0 for training over GPUs, "
        "or one worker per node with the instance in CUDA_VISIBLE_DEVICES",
        summary="GPUs are divided into instances (MIG)",
        status="warn",
    )


def _of_maker(reports: Sequence[NodeReport], nodes: Mapping[str, str], nvidia: str, amd: str) -> str:
    """Return the text for the maker of the GPUs on the nodes in `nodes`."""
    makers = {n.facts["vendor"] for n in reports if nodes.get(n.name)}
    return amd if makers == {"amd"} else nvidia


def _check_network_hardware(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    closed = {
        n.name: ", ".join(dict.fromkeys(p["device"] for p in n.facts["rdma"] if p.get("verbs") == "no"))
        for n in reports
    }
    yield from build_shared_finding(
        "rdma",
        {node: text for node, text in closed.items() if text},
        "hand /dev/infiniband into the container (docker --device, or the RDMA device plug-in), or NCCL takes TCP",
        summary="a job is not allowed to open RDMA devices that the node has",
        status="warn",
    )
    dead = {n.name: text for n in reports if (text := ", ".join(find_dead_ports(n.facts["rdma"])))}
    yield from build_shared_finding(
        "rdma",
        dead,
        "check cable, switch port and subnet manager (ibstat); or leave the port out with NCCL_IB_HCA",
        summary="an RDMA port is not active",
        status="warn",
    )
    if not dead:
        ports = {n.name: ", ".join(f"{p['device']}:{p['port']} {p['rate']}" for p in n.facts["rdma"]) for n in reports}
        fix = "check cables and switch ports (ibstat): a port that has trained down runs at half or a quarter"
        yield from compare_node_values("rdma", ports, fix, what="rate or number of RDMA ports", status="warn")
    speeds = {n.name: f"{speed} Mbit/s" for n in reports if (speed := _read_interface_speed(n, reports))}
    fix = "ethtool INTERFACE shows what it has agreed on with the switch; check cable and port"
    yield from compare_node_values("link-speed", speeds, fix, what="speed of the network card", status="warn")


def _read_interface_speed(node: NodeReport, reports: Sequence[NodeReport]) -> int:
    """Return the speed in Mbit/s of the interface towards the other nodes; 0 if the interface reports none."""
    speeds = {interface["name"]: int(interface.get("mbit_s", 0)) for interface in node.facts["interfaces"]}
    ways = [node.facts["ways"].get(other.address, "") for other in reports if other is not node]
    return next((speeds[way] for way in ways if way in speeds), 0)


def parse_gpu_rows(said: str) -> list[dict[str, str]]:
    """Return `index`, `name`, `used`, `total` (MiB), `driver`, `ecc` of each GPU, from the query of nvidia-smi."""
    names = ("index", "name", "used", "total", "driver", "ecc")
    rows = (line.split(",") for line in said.splitlines())
    return [dict(zip(names, (word.strip() for word in row), strict=False)) for row in rows if len(row) >= 4]


def find_busy_gpus(said: str) -> list[str]:
    """Return the GPUs that have more than a tenth of their memory in use."""
    return [
        f"GPU {row['index']} {row['used']} of {row['total']} MiB"
        for row in parse_gpu_rows(said)
        if row["used"].isdigit() and row["total"].isdigit() and int(row["used"]) * 10 > int(row["total"])
    ]


def find_ecc_errors(said: str, remapped: str) -> list[str]:
    """Return GPUs with uncorrected memory errors since the last reset, or with rows that wait for remapping."""
    errors = [
        f"GPU {row['index']} has {row['ecc']} uncorrected errors"
        for row in parse_gpu_rows(said)
        if row.get("ecc", "").isdigit() and int(row["ecc"])
    ]
    for line in remapped.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and words[2] in ("Yes", "1"):
            errors.append(f"{words[0]} could not remap a row")
        elif len(words) == 3 and words[1] in ("Yes", "1"):
            errors.append(f"{words[0]} waits for a reset to remap a row")
    return errors


def parse_gpu_states(said: str) -> list[dict[str, str]]:
    """Return the settings of each GPU, from the probe's query of nvidia-smi.

    Returns:
        Rows of `index`, `awake` (persistence mode), power `limit` and the board's `usual` limit in W, `reasons` of its
        clocks (a bit mask; for AMD's GPUs the forced performance level), PCIe lanes `width` and `widest`, `mig` and
        `ecc`.
    """
    names = ("index", "awake", "limit", "usual", "reasons", "width", "widest", "mig", "ecc")
    rows = [[word.strip() for word in line.split(",")] for line in said.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def is_capped(row: Mapping[str, str]) -> bool:
    """Return whether the power limit of a GPU is below the default of its board."""
    try:
        return float(row["limit"]) < 0.98 * float(row["usual"])
    except ValueError:  # the value is [N/A]
        return False


def explain_low_clocks(reasons: str) -> list[str]:
    """Return the causes of low clocks in the bit mask of nvidia-smi, or in the level of AMD's driver."""
    if reasons in HELD:
        return [HELD[reasons]]
    try:
        bits = int(reasons, 16)
    except ValueError:
        return []
    return [text for bit, text in SLOWED.items() if bits & bit]


def find_amd_errors(said: str) -> list[str]:
    """Return the kernel's messages about AMD GPUs that were reset or have errors, without times and repetitions."""
    return list(dict.fromkeys(line[line.find("amdgpu") :] for line in said.splitlines() if "amdgpu" in line))[:4]


def find_fabric_errors(said: str) -> list[str]:
    """Return GPUs that have not joined the NVSwitch fabric, from index, state and status; N/A means no fabric."""
    errors = []
    for line in said.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 3:
            continue
        index, state, status = words
        has_failed = state == "Completed" and status != "Success"
        if has_failed or state in ("In Progress", "Not Started"):
            errors.append(f"GPU {index} is {state} ({status})")
    return errors


def find_xid_errors(said: str) -> list[tuple[str, int]]:
    """Return (GPU, number) for each hardware error in the kernel's messages, without repetitions."""
    # Xid 154 with this text reports the end of an error.
    lines = [line for line in said.splitlines() if "Xid" in line and "to 0x0 (None)" not in line]
    errors = [(match["gpu"], int(match["number"])) for line in lines for match in _XID.finditer(line)]
    return [one for one in dict.fromkeys(errors) if one[1] in XID]


def count_active_nvlinks(said: str) -> dict[str, int]:
    """Return GPU -> active links, from `nvidia-smi nvlink --status`; GPUs without links are omitted."""
    found: dict[str, int] = {}
    gpu = ""
    for line in said.splitlines():
        if line.startswith("GPU "):
            gpu = line[4:].partition(":")[0]
        elif line.strip().startswith("Link ") and gpu:
            found[gpu] = found.get(gpu, 0) + ("GB/s" in line)
    return {gpu: links for gpu, links in found.items() if links}


def find_missing_links(gpus: str, said: str) -> list[str]:
    """Return GPUs with fewer active links than boards of their kind; empty if nvidia-smi reports no links."""
    from dtctl.doctor.checks.known_gpus import find_gpu_datasheet

    active = count_active_nvlinks(said)
    kinds = [
        (row["index"], find_gpu_datasheet(row["name"]) or {})
        for row in parse_gpu_rows(gpus)
        if "PCI" not in row["name"].upper()
    ]
    return [
        f"GPU {index} has {active.get(index, 0)} of {kind['nvlinks']}"
        for index, kind in kinds
        if said.strip() and active.get(index, 0) < kind.get("nvlinks", 0)
    ]


def parse_gpu_topology(said: str) -> str:
    """Return the GPUs' part of `nvidia-smi topo -m`, with one row per GPU."""
    # The header before the matrix begins with an escape sequence, or only with a tab.
    rows = [line.split() for line in said.splitlines() if _ROW.match(line)]
    rows = [row for row in rows if not row[1].startswith("GPU")]
    return "; ".join(" ".join(row[1 : len(rows) + 1]) for row in rows)


def find_dead_ports(ports: Sequence[Mapping[str, str]]) -> list[str]:
    """Return RDMA ports that are down although other ports of the node are up."""
    states = {f"{port['device']}:{port['port']}": port["state"] for port in ports}
    up = [name for name, state in states.items() if "ACTIVE" in state]
    return [f"{name} {state}" for name, state in states.items() if up and "ACTIVE" not in state]
