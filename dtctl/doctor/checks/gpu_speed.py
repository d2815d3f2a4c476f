"""Measurement of every GPU of every node, and comparison with the data sheet and with GPUs of the same kind.

The job's own Python measures all nodes at the same time: products in half precision, copies from and to the host, and
an all_reduce over the GPUs of the node by NCCL (RCCL on AMD), each until the GPU has finished.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from dtctl.doctor.checks.collective import GRACE_S, LOAD_LIMIT_S
from dtctl.doctor.checks.known_gpus import find_gpu_datasheet
from dtctl.doctor.checks.node import build_shared_finding
from dtctl.doctor.findings import Finding
from dtctl.doctor.node_probes import NodeProbes, Progress
from dtctl.doctor.node_report import NodeReport
from dtctl.printable import format_count
from dtctl.supervisor.messages.probe import QueryPython, StartPython

RAN = ("gpu-speed", "gpu-copies", "gpu-nccl")
LIMIT_S = 120.0
"""Longest time for all GPUs of a node in seconds, including first contexts without persistence mode and NCCL's
start."""
PRODUCTS = 0.9
"""Share of the rate that large products are known to reach on a kind of GPU; a slower GPU is reported."""
WITHIN = 0.6
"""Share of the memory's rate that copies within a GPU must reach; 75% to 90% is usual."""
COPIES = 0.6
"""Share of the data sheet's rate that copies from and to page-locked memory must reach; 80% to 95% is usual."""
SUMS = 0.5
"""Share of the links' rate that an all_reduce of 256 MiB over all GPUs must reach; 60% to 80% is usual."""
LIKE_OTHERS = 0.9
"""Share of the median of GPUs of the same kind below which a GPU is slow, regardless of the data sheet."""
LEAST_LINK_GB_S = 100.0
"""Rate below which links are PCIe, whose bandwidth for an all_reduce depends on the board."""


def check_gpus_present(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield a finding about nodes without a GPU, for an examination with `--gpu`."""
    none = {
        report.name: "no GPU that this user is allowed to open"
        for report in reports
        if report.error is None and not report.facts["gpus"]
    }
    yield from build_shared_finding(
        "gpus",
        none,
        "is there one (lspci), is its driver loaded (nvidia-smi, rocm-smi), and may this user open /dev/nvidia0 or "
        "/dev/kfd? containers and Slurm jobs have to be given GPUs; without --gpu, CPUs are examined",
        summary="there is no GPU to measure",
    )


def measure_node_gpus(
    probes: NodeProbes,
    reports: Sequence[NodeReport],
    *,
    python: Mapping[str, str],
    env: Mapping[str, Mapping[str, str]],
    progress: Progress,
) -> dict[str, dict[str, Any]]:
    """Measure the GPUs of all nodes that have some, with torch; return node -> report of its worker.

    Args:
        probes: connections to the nodes' probes.
        reports: the nodes.
        python: node -> Python of the job on that node.
        env: node -> variables of the job on that node.
        progress: called with the current activity.
    """
    names = [report.name for report in reports if report.error is None and report.facts["gpus"]]
    if not names:
        return {}
    text = resources.files("dtctl.doctor").joinpath("worker.py").read_text(encoding="utf-8")
    starts = {
        name: StartPython(python=python[name], text=text, env=dict(env[name]), interface="", limit_s=LOAD_LIMIT_S)
        for name in names
    }
    loaded = probes.send_requests(starts, limit_s=LOAD_LIMIT_S + GRACE_S, doing="loading torch")
    ready = [name for name in names if loaded.get(name, {}).get("stage") == "torch"]
    progress(f"measuring the GPUs of {format_count(len(ready), 'node')}")
    asked = {name: QueryPython(asks=[{"what": "gpus"}], limit_s=LIMIT_S) for name in ready}
    said = probes.send_requests(asked, limit_s=LIMIT_S + GRACE_S, doing="measuring GPUs")
    return {name: said.get(name) or loaded.get(name) or {"silent": True} for name in names}


def check_gpu_speed(measured: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield findings about GPUs that torch cannot use, and about slow GPUs and links. Pure.

    Args:
        measured: result of `measure_node_gpus`.
    """
    yield from _check_failed_measurements(measured)
    gpus = build_gpu_speed_rows(measured)
    yield from _check_slow_gpus(gpus)
    yield from build_shared_finding(
        "gpu-copies",
        _by_node(_find_slow_copies(gpus)),
        "nvidia-smi -q -d PCIE under load: a link that has trained down (width, generation), or memory of the other "
        "processor (numactl, cluster.env)",
        summary="copies are slow",
        status="warn",
    )
    sums = {
        name: text
        for name, one in measured.items()
        if (text := _describe_slow_sum(one.get("busbw_gb_s"), one.get("gpus") or []))
    }
    yield from build_shared_finding(
        "gpu-nccl",
        sums,
        "nvidia-smi topo -m and nvlink --status; NCCL_DEBUG=INFO shows if it uses P2P or goes through the host "
        "(ACS, IOMMU, NCCL_P2P_DISABLE, a missing fabric manager)",
        summary="an all_reduce over the GPUs of the node is slow",
        status="warn",
    )


def _check_failed_measurements(measured: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    unusable = {
        name: str(one.get("complained") or one.get("error") or "it says nothing more")
        for name, one in measured.items()
        if not one.get("gpus") and not (one.get("silent") and "GPU" in str(one.get("stage")))
    }
    yield from build_shared_finding(
        "gpu-speed",
        unusable,
        "python -c 'import torch; torch.cuda.init()' there, with the job's Python: a torch built for CPUs, or for a "
        "newer driver; error 802: nvidia-fabricmanager does not run",
        summary="torch cannot use the GPUs",
    )
    broken = {
        name: f"stops at {one['stage']}" for name, one in measured.items() if one.get("silent") and one.get("stage")
    }
    for check, at in (("gpu-speed", "GPU"), ("gpu-nccl", "NCCL")):
        yield from build_shared_finding(
            check,
            {name: text for name, text in broken.items() if at in text},
            "dmesg | grep -iE 'xid|nvlink|amdgpu'; reset the GPU or restart the node",
            summary="a measurement never finishes",
        )
    errors = _by_node((one, one["error"]) for one in build_gpu_speed_rows(measured) if one["error"])
    yield from build_shared_finding(
        "gpu-speed",
        errors,
        "nvidia-smi shows who uses its memory; dmesg | grep -i xid whether it is broken",
        summary="a GPU cannot compute",
    )


def _check_slow_gpus(gpus: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    kinds: dict[str, list[float]] = {}
    for gpu in gpus:
        if gpu.get("tflops"):
            kinds.setdefault(gpu["name"], []).append(gpu["tflops"])
    usual = {name: statistics.median(values) for name, values in kinds.items()}
    slow = []
    for gpu in gpus:
        value, known = gpu.get("tflops"), find_gpu_datasheet(gpu["name"])
        if not value:
            continue
        if value < LIKE_OTHERS * usual[gpu["name"]]:
            slow.append((gpu, f"{value:.0f} TFLOPS; GPUs of its kind reach {usual[gpu['name']]:.0f}"))
        elif known and value < PRODUCTS * known["products"] * known["half"]:
            slow.append((gpu, f"{value:.0f} TFLOPS, {value / known['half']:.0%} of the data sheet's {known['half']:g}"))
    yield from build_shared_finding(
        "gpu-speed",
        _by_node(slow),
        "nvidia-smi -q -d CLOCK,POWER,TEMPERATURE,PERFORMANCE while it computes: a power cap, heat, locked clocks, or "
        "another process; one slow GPU slows down the whole job",
        summary="a GPU computes slowly",
        status="warn",
    )


def _find_slow_copies(gpus: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    for gpu in gpus:
        known = find_gpu_datasheet(gpu["name"])
        for name, way in (("to_gb_s", "from the host"), ("from_gb_s", "to the host")):
            value = gpu.get(name)
            if known and value and value < COPIES * known["host"]:
                yield gpu, f"{value:.1f} GB/s {way}, {known['host']:g} are normal"
        within = gpu.get("within_gb_s")
        if known and within and within < WITHIN * known["hbm"]:
            yield gpu, f"{within:.0f} GB/s within the GPU; the specification of its memory is {known['hbm']:g}"


def _describe_slow_sum(busbw_gb_s: float | None, gpus: Sequence[Mapping[str, Any]]) -> str:
    known = find_gpu_datasheet(str(gpus[0]["name"])) if gpus else None
    if not busbw_gb_s or known is None or known["link"] < LEAST_LINK_GB_S or busbw_gb_s >= SUMS * known["link"]:
        return ""
    least = SUMS * known["link"]
    return f"{busbw_gb_s:.0f} GB/s bus bandwidth over {format_count(len(gpus), 'GPU')}, {least:.0f} or more are normal"


def _by_node(told: Any) -> dict[str, str]:
    text_of_node: dict[str, str] = {}
    for one, text in told:
        before = text_of_node.get(one["node"])
        text_of_node[one["node"]] = (f"{before}; " if before else "") + f"GPU {one['gpu']}: {text}"
    return text_of_node


def build_gpu_speed_rows(measured: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return a row for each GPU: `node`, `gpu`, `name`, its figures, and `busbw_gb_s` of the all_reduce on its node."""
    return tuple(
        {
            "node": node,
            "gpu": index,
            **{name: value if isinstance(value, str) else round(value, 2) for name, value in gpu.items()},
            "busbw_gb_s": round(one["busbw_gb_s"], 2) if one.get("busbw_gb_s") else None,
        }
        for node, one in measured.items()
        for index, gpu in enumerate(one.get("gpus") or [])
    )
