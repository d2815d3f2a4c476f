"""Examination of a spec's cluster: the requests to the nodes, the checks in their order, and the result."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dtctl import node_facts
from dtctl.doctor import coverage
from dtctl.doctor.checks import address_checks as checks_of_used
from dtctl.doctor.checks import (
    collective,
    environment,
    hardware,
    links,
    network,
    network_settings,
    node,
    scheduler,
    shared_folders,
)
from dtctl.doctor.findings import Finding, order_findings
from dtctl.doctor.node_probes import Locate, NodeProbes, NodeQuery, Progress
from dtctl.doctor.node_report import NodeReport
from dtctl.doctor.planned_addresses import (
    NCCL,
    UsedInterface,
    choose_data_address,
    find_named_interfaces,
    resolve_rendezvous_address,
)
from dtctl.launch.cluster import ResolvedCluster
from dtctl.plan import rendezvous
from dtctl.spec.model import Spec
from dtctl.spec.nodes import NodeSpec

DATA_PORTS = 3
"""Number of random ports on which each node listens. A firewall rule for all of the range is always found, one for a
part of it only by chance."""
QUICK_DATA_PORTS = 1
STRETCHES = 12
QUICK_STRETCHES = 4
"""Numbers of parts into which each range of ports is divided. A port of each part is called, so a rule that covers two
parts is always found."""
MAX_BESIDE = 1000
MEASURE_S = 0.3
"""Duration of the measurement of a link in seconds: results are within 10% of iperf3's, and 16 nodes take 15 s."""


Costly = Literal["links", "collective"]
COSTLY: tuple[Costly, ...] = get_args(Costly)
"""Layers that take more than a moment; the quick examination omits them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Result of an examination."""

    findings: tuple[Finding, ...]
    seen: tuple[NodeReport, ...]
    sums: dict[str, Any] = field(default_factory=dict)
    """`backend`, `workers`, `bytes`, `seconds` and `busbw_gb_s` of an all_reduce over all nodes; empty if there was
    none."""
    gpus: tuple[dict[str, Any], ...] = ()
    """Measurements of each GPU with `--gpu`: `node`, `gpu` (its index), `name`, `tflops`, `to_gb_s` and `from_gb_s`
    (from and to the host), `within_gb_s`, and `busbw_gb_s` of an all_reduce over the GPUs of its node."""

    @property
    def ok(self) -> bool:
        """Return whether no check has failed."""
        return not any(finding.status == "fail" for finding in self.findings)

    @property
    def can_train(self) -> bool | None:
        """Return whether these nodes can run a launch of the spec, as far as the doctor examines it.

        False: a check has failed. None: no check has failed, but a need of a launch was not examined.
        """
        if not self.ok:
            return False
        return None if any(finding.missing for finding in self.findings) else True

    @property
    def not_examined(self) -> tuple[str, ...]:
        """Return one sentence without a period for each need that was not examined; those never examined are last."""
        skipped = dict.fromkeys(finding.summary for finding in self.findings if finding.status == "skip")
        return (*skipped, "the job's own code and data")


def examine_spec_nodes(
    spec: Spec, cluster: ResolvedCluster, *, skip: Collection[Costly], progress: Progress, gpu: bool = False
) -> Examination:
    """Examine all nodes of a spec.

    Args:
        spec: the checked spec.
        cluster: nodes of the spec.
        skip: layers to omit; if all are omitted (`--quick`), fewer ports per pair are tested, too.
        progress: called with the current activity.
        gpu: whether each GPU is measured, too.

    Raises:
        DtctlError: this machine has a problem; problems of the nodes are findings.
    """
    fixed = spec.network.rendezvous_port
    candidates = rendezvous.list_rendezvous_ports("doctor", 0, fixed if isinstance(fixed, int) else None)[:3]
    wanted = [build_node_query(spec, one, cluster) for one in cluster.nodes]
    quick = set(skip) >= set(COSTLY)
    envs = {one.name: collect_spec_variables(spec, one) for one in cluster.nodes}
    with contextlib.closing(NodeProbes(wanted, cluster.make_transport(), progress=progress)) as probes:
        reports = probes.collect_reports(
            rendezvous=candidates,
            data_ports=QUICK_DATA_PORTS if quick else DATA_PORTS,
            measure_s=0.0 if "links" in skip else MEASURE_S,
            names=list_host_names(spec, cluster),
            locate=make_address_locator(spec, envs),
            spread=QUICK_STRETCHES if quick else STRETCHES,
        )
        findings, ran = _run_cluster_checks(spec, cluster, reports, candidates, envs, measured="links" not in skip)
        findings = network_settings.add_network_settings(probes, reports, findings)
        folders = list(dict.fromkeys(path for one in wanted for path in one.paths))
        if folders and not quick and len(reports) > 1:
            findings += shared_folders.check_shared_folders(
                shared_folders.measure_folder_sharing(probes, reports, folders)
            )
            ran += shared_folders.RAN
        python = {one.name: one.python or "python3" for one in cluster.nodes}
        gpus: tuple[dict[str, Any], ...] = ()
        if gpu:
            measured = _measure_gpus(probes, reports, python=python, env=envs, progress=progress)
            gpus = measured.rows
            findings += measured.findings
            ran += measured.ran
        sums = collective.AllReduceResult()
        if "collective" not in skip and _can_add_up(reports, findings, every_gpu=gpu):
            variables = {one.name: collect_launch_variables(spec, one) for one in cluster.nodes}
            sums = collective.check_all_reduce(
                probes, reports, python=python, env=variables, progress=progress, every_gpu=gpu
            )
            # A node that was lost during the all-reduce is no failure of the all-reduce.
            lost_meanwhile = list(node.check_reachability([one for one in reports if one.error is not None]))
            findings += lost_meanwhile or sums.findings
            ran += collective.RAN
        if any(one.error is None for one in reports):
            findings += node.check_job_python([one for one in reports if one.error is None and one.facts], sums.uses)
    lost = coverage.find_unexamined_needs(reports, skip=skip, ran=ran, rendezvous=bool(candidates), found=findings)
    return Examination(
        findings=tuple(order_findings(findings, ran=ran, unexamined=lost)),
        seen=tuple(reports),
        sums=sums.figures,
        gpus=gpus,
    )


@dataclass(frozen=True, slots=True)
class _MeasuredGpus:
    findings: list[Finding]
    ran: tuple[str, ...]
    """Checks that were made; none without a GPU."""
    rows: tuple[dict[str, Any], ...]
    """See `Examination.gpus`."""


def _measure_gpus(
    probes: NodeProbes,
    reports: Sequence[NodeReport],
    *,
    python: Mapping[str, str],
    env: Mapping[str, Mapping[str, str]],
    progress: Progress,
) -> _MeasuredGpus:
    from dtctl.doctor.checks import gpu_speed  # Most examinations measure no GPU.

    measured = gpu_speed.measure_node_gpus(probes, reports, python=python, env=env, progress=progress)
    findings = [*gpu_speed.check_gpus_present(reports), *gpu_speed.check_gpu_speed(measured)]
    return _MeasuredGpus(findings, gpu_speed.RAN if measured else (), gpu_speed.build_gpu_speed_rows(measured))


def _can_add_up(reports: list[NodeReport], found: list[Finding], *, every_gpu: bool) -> bool:
    """Return whether an all-reduce is possible: without failures, with torch, and on several nodes or GPUs."""
    alone = len(reports) < 2 and not (every_gpu and all(one.error is None and one.facts["gpus"] > 1 for one in reports))
    if alone or any(one.status == "fail" for one in found):
        return False
    return all(
        one.error is None and one.facts["job"].get("torch") and not one.facts["job"].get("error") for one in reports
    )


def collect_spec_variables(spec: Spec, one: NodeSpec) -> dict[str, str]:
    """Return the variables that the spec sets for a node's workers."""
    return {**spec.job.env, **one.env}


def collect_launch_variables(spec: Spec, one: NodeSpec) -> dict[str, str]:
    """Return a node's variables with the value of `network.interface`; as in a launch, the spec takes precedence."""
    chosen = spec.network.interface
    name = chosen.get(one.name) if isinstance(chosen, Mapping) else chosen
    fixed = {} if name in (None, "auto") else {"GLOO_SOCKET_IFNAME": str(name), NCCL: f"={name}"}
    return {**fixed, **collect_spec_variables(spec, one)}


def list_host_names(spec: Spec, cluster: ResolvedCluster) -> list[str]:
    """Return host names that all nodes must resolve alike: the nodes', and the rendezvous address."""
    meeting = spec.network.rendezvous_address
    return [*(spec_node.name for spec_node in cluster.nodes), "localhost", *([meeting] if meeting else [])]


def _collect_used_interfaces(
    reports: Iterable[NodeReport], spec: Spec, envs: Mapping[str, Mapping[str, str]]
) -> dict[str, list[UsedInterface]]:
    return {node.name: find_named_interfaces(node, spec, envs[node.name]) for node in reports}


def make_address_locator(spec: Spec, envs: Mapping[str, Mapping[str, str]]) -> Locate:
    """Return a function that sets the workers' addresses and the rendezvous in the nodes' reports."""

    def locate(reports: Sequence[NodeReport]) -> None:
        used = _collect_used_interfaces(reports, spec, envs)
        for report in reports:
            report.data_address = choose_data_address(report, used[report.name])
        for report in reports:
            report.meeting = resolve_rendezvous_address(spec, reports[0], report)

    return locate


def _run_cluster_checks(
    spec: Spec,
    cluster: ResolvedCluster,
    reports: list[NodeReport],
    candidates: tuple[int, ...],
    envs: Mapping[str, Mapping[str, str]],
    *,
    measured: bool,
) -> tuple[list[Finding], list[str]]:
    """Return the findings, and the names of the checks that were made."""
    findings = list(node.check_reachability(reports, node_facts.read_arp_neighbours()))
    well = [one for one in reports if one.error is None]
    ran = list(node.RAN_REACH)
    if well:
        slots = {one.name: one.slots for one in cluster.nodes if isinstance(one.slots, int)}
        findings += _run_node_checks(well, spec, slots)
        findings += environment.check_environment_variables(well, envs)
        fixed = spec.network.rendezvous_port
        findings += scheduler.check_slurm_job(
            os.environ,
            scheduler.read_slurm_job(os.environ),
            node=well[0].name,
            nodes=len(reports),
            kind=spec.job.kind,
            now=time.time(),
            fixed_port=fixed if isinstance(fixed, int) else None,
        )
        ran += [*node.RAN, *hardware.RAN, *environment.RAN, *(scheduler.RAN if "SLURM_JOB_ID" in os.environ else ())]
        used = list(checks_of_used.check_named_interfaces(well, _collect_used_interfaces(well, spec, envs)))
        explained = {name for finding in used for name in finding.nodes}
        head_is_well = well[0] is reports[0]
        meeting: list[Finding] = []
        if head_is_well:
            meeting = list(checks_of_used.check_rendezvous_address(well, spec.network.rendezvous_address))
            used += meeting
        findings += used
        ran += checks_of_used.RAN
    if len(well) > 1:
        findings += network.check_host_names(well, [one.name for one in cluster.nodes])
        findings += network.check_node_addresses(well)
        findings += network.check_ephemeral_ports(well)
        if head_is_well:
            fixed = spec.network.rendezvous_port
            judged = list(
                network.check_node_pairs(well, rendezvous=candidates, fixed=isinstance(fixed, int), explained=explained)
            )
            # If the address itself is wrong, the result for its port is meaningless.
            findings += [one for one in judged if not (meeting and one.check == "rendezvous-port" and one.peers)]
        else:  # the head node does not answer, but the others are tested
            findings += network.check_node_pairs(well, rendezvous=(), fixed=False, explained=explained)
        findings += links.check_links(well)
        ran += [*network.RAN, *(links.RAN if measured else ())]
    return findings, ran


def _run_node_checks(well: list[NodeReport], spec: Spec, slots: dict[str, int]) -> list[Finding]:
    return [
        *node.check_process_limits(well),
        *node.check_storage(well, spec.cluster.workdir),
        *node.check_software_versions(well),
        *(node.check_torch_exists(well, needed_by) if (needed_by := _find_need_of_torch(spec)) else ()),
        *node.check_node_clocks(well),
        *hardware.check_hardware(well, slots),
    ]


def _find_need_of_torch(spec: Spec) -> str:
    """Return what of the job needs torch in the Python that was examined; empty if nothing does.

    A job's own environment is made at its launch, and its set-up may choose another Python.
    """
    job = spec.job
    if job.environment is not None or (job.setup and spec.cluster.python is None):
        return ""
    if spec.train is not None:
        return "the section `train`"
    kind = job.kind or ("torchrun" if job.script or job.module else "")
    return f"kind {kind}" if kind in ("torchrun", "accelerate", "deepspeed") else ""


def build_node_query(spec: Spec, one: NodeSpec, cluster: ResolvedCluster) -> NodeQuery:
    """Return the request for facts about a node of the spec."""
    data = spec.settings.get("data", {})
    # Relative paths may lie in the code that a launch copies; only absolute ones must exist now.
    absolute = [value for value in data.values() if isinstance(value, str) and value.startswith(("/", "~"))]
    return NodeQuery(
        target=cluster.targets[one.name],
        python=one.python,
        workdir=one.workdir,
        paths=(*absolute, *(() if spec.pushes else (spec.code_folder,))),
        code="" if spec.pushes else spec.code_folder,
        env=collect_launch_variables(spec, one),
        slots=one.slots if isinstance(one.slots, int) else 1,
        beside=tuple(_list_sibling_modules(spec)) if spec.pushes else (),
    )


def _list_sibling_modules(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield name and path of modules next to the job's script, which Python finds before its own."""
    script = spec.job.script
    if not script or not script.endswith(".py"):
        return
    folder = (spec.base_dir / spec.job.files.root / script).parent
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries[:MAX_BESIDE]:
        if entry.suffix == ".py" and entry.name != Path(script).name:
            yield entry.stem, entry.name
        elif (entry / "__init__.py").is_file():
            yield entry.name, f"{entry.name}/__init__.py"
