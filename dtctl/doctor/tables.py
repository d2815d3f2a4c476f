"""Tables of an examination: nodes by layer, and pairs with problems. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dtctl.doctor.checks.links import RAN, format_rate
from dtctl.doctor.examine import Examination
from dtctl.doctor.node_report import NodeReport

_LAYERS = {
    "REACH": ("reach", "host-key", "login", "start-up", "python", "shell-output", "clock", "slow-login"),
    "LIMITS": ("workdir", "disk", "tmpdir", "nofile", "processes", "memory", "limits", "memlock", "shm", "path",
               "shared", "visibility", "cache", "file-variable", "cpus", "time-left", "requeue", "tasks"),
    "SOFTWARE": ("python-environment", "shadowing", "python-version", "torch", "nccl", "architecture", "code"),
    "HARDWARE": ("gpus", "gpu-xid", "gpu-ecc", "gpu-driver", "gpu-model", "gpu-links", "gpu-busy", "gpu-power",
                 "gpu-clocks", "gpu-pcie", "gpu-mig", "gpu-speed", "gpu-copies", "gpu-nccl", "rdma", "link-speed"),
    "NETWORK": ("duplicate-mac", "duplicate-address", "duplicate-hostname", "loopback-name", "names", "ephemeral-ports",
                "neighbour-table", "data-ports", "rendezvous-port", "large-packets", "stream", "nat", "mtu",
                "packet-loss", "duplicate-packets", "bandwidth", "latency"),
    "SETTINGS": ("interface", "rendezvous-address", "env-differs", "env-unknown", "env-dead", "env-dangerous"),
    "TORCH": ("collective",),
}  # fmt: skip
_SHORT = {
    "ok": ".", "dropped": "DROP", "no-room": "NOROOM", "refused": "REJECT", "unreachable": "NOROUTE",
    "silent": "SILENT", "stranger": "OTHER", "large-lost": "MTU", "error": "ERROR",
}  # fmt: skip
MAX_MATRIX = 40


def build_node_table(done: Examination) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: each node's worst result in each layer.

    `-` means that nothing was examined, `partly` that nothing is wrong but a need of a launch was not examined.
    """
    rows = []
    for seen in done.seen:
        cells = [_summarize_layer(done, seen, checks) for checks in _LAYERS.values()]
        rows.append([seen.name, seen.address or seen.target, *cells])
    return ["NODE", "ADDRESS", *_LAYERS], rows


def _summarize_layer(done: Examination, seen: NodeReport, checks: Collection[str]) -> str:
    """Return the worst result of the checks of a layer on a node."""
    of_layer = [finding for finding in done.findings if finding.check in checks]
    is_examined = any(finding.status != "skip" for finding in of_layer)
    is_unreached = seen.error is not None and "reach" not in checks
    if not is_examined or is_unreached:
        return "-"
    here = [finding for finding in of_layer if seen.name in finding.nodes]
    for status in ("fail", "warn"):
        if any(finding.status == status for finding in here):
            return status
    return "partly" if any(finding.missing for finding in here) else "ok"


def build_gpu_table(done: Examination) -> tuple[list[str], list[list[str]]] | None:
    """Return header and rows with the measurements of each GPU (`--gpu`); None if there are none."""
    if not done.gpus:
        return None
    rows = []
    for gpu in done.gpus:
        cells = [
            _format_figure(gpu.get(name)) for name in ("tflops", "to_gb_s", "from_gb_s", "within_gb_s", "busbw_gb_s")
        ]
        rows.append([gpu["node"], str(gpu["gpu"]), gpu["name"], *cells])
    return ["NODE", "GPU", "KIND", "TFLOPS", "HOST TO GPU", "GPU TO HOST", "WITHIN GPU", "NCCL OF NODE"], rows


def _format_figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def build_pair_table(done: Examination) -> tuple[list[str], list[list[str]]] | None:
    """Return header and rows of the calls between nodes; None if no pair has a problem, or too many have one."""
    names = [seen.name for seen in done.seen]
    worst: dict[tuple[str, str], str] = {}
    for seen in done.seen:
        for answer in seen.answers:
            if answer["result"] != "ok":
                worst.setdefault((seen.name, answer["node"]), answer["result"])
    if not worst or len(names) > MAX_MATRIX:
        return None
    called = {(seen.name, answer["node"]) for seen in done.seen for answer in seen.answers}
    cells = {pair: _SHORT[worst.get(pair, "ok")] for pair in called}
    rows = _build_matrix(names, cells)
    return ["FROM \\ TO", *names], rows


def list_link_measurements(reports: Sequence[NodeReport]) -> list[dict[str, Any]]:
    """Return an object for each pair: `from`, `to`, `mbit_s`, `rtt_ms`, `sent`, `lost`; the better of two tries."""
    links = []
    for node in reports:
        for other, tries in node.measured.items():
            best = max(tries, key=lambda one: one.get("mbit_s") or 0.0)
            facts = {name: best.get(name) for name in ("mbit_s", "sent", "lost")}
            links.append({"from": node.name, "to": other, "rtt_ms": (best.get("rtt_ms") or [None])[0], **facts})
    return links


def link_table(done: Examination) -> tuple[list[str], list[list[str]]] | None:
    """Return header and rows of the bandwidths between nodes; None if no link is at fault, or there are too many."""
    names = [seen.name for seen in done.seen]
    bad = any(one.check in RAN and one.status in ("fail", "warn") for one in done.findings)
    if not bad or len(names) > MAX_MATRIX:
        return None
    measured = [link for link in list_link_measurements(done.seen) if link["mbit_s"]]
    rows = _build_matrix(names, {(link["from"], link["to"]): format_rate(link["mbit_s"]) for link in measured})
    return ["FROM \\ TO", *names], rows


def _build_matrix(names: Sequence[str], cells: Mapping[tuple[str, str], str]) -> list[list[str]]:
    """Return a row for each node with its cell for each other node; `?` where there is none."""
    rows = []
    for name in names:
        row = ["" if other == name else cells.get((name, other), "?") for other in names]
        rows.append([name, *row])
    return rows
