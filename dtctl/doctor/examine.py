"""The examination of a spec's cluster: what to ask, the checks in their order, and the answer."""

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
from dtctl.doctor.checks import collective, environment, hardware, links, network, node, scheduler, shared_folders
from dtctl.doctor.checks import used as checks_of_used
from dtctl.doctor.findings import Finding, ordered
from dtctl.doctor.node_report import NodeReport
from dtctl.doctor.observe import Locate, NodeQuery, Probes, Progress
from dtctl.doctor.used import NCCL, UsedInterface, data_address, meeting_address, named_interfaces
from dtctl.launch.cluster import ResolvedCluster
from dtctl.plan import rendezvous
from dtctl.spec.model import Spec
from dtctl.spec.nodes import NodeSpec

DATA_PORTS = 3
"""Random ports that each node listens on: a rule for a part of the range is found with luck, for all of it always."""
QUICK_DATA_PORTS = 1
STRETCHES = 12
QUICK_STRETCHES = 4
"""Into which each range of ports is divided, with a port of each called: a rule for twice as much is always found."""
MAX_BESIDE = 1000
MEASURE_S = 0.3
"""Seconds for which a way is measured: within 10 % of what iperf3 finds, and 16 nodes take 15 s."""


Costly = Literal["links", "collective"]
COSTLY: tuple[Costly, ...] = get_args(Costly)
"""Layers that take more than a moment, which the quick examination leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Result of an examination."""

    findings: tuple[Finding, ...]
    seen: tuple[NodeReport, ...]
    sums: dict[str, Any] = field(default_factory=dict)
    """`backend`, `workers`, `bytes`, `seconds` and `busbw_gb_s` of an all_reduce over all nodes; empty when there was
    none."""
    gpus: tuple[dict[str, Any], ...] = ()
    """Measurements of each GPU with `--gpu`: `node`, `gpu` (its index), `name`, `tflops`, `to_gb_s` and `from_gb_s`
    (from and to the host), `within_gb_s`, and `busbw_gb_s` of an all_reduce over the GPUs of its node."""

    @property
    def ok(self) -> bool:
        """Return whether nothing has failed of what was examined."""
        return not any(finding.status == "fail" for finding in self.findings)

    @property
    def can_train(self) -> bool | None:
        """Return whether these nodes can run a launch of the spec, as far as the doctor examines it.

        False: something has failed. None: nothing has, but something that a launch needs was not examined.
        """
        if not self.ok:
            return False
        return None if any(finding.missing for finding in self.findings) else True

    @property
    def not_examined(self) -> tuple[str, ...]:
        """Return what was not examined, one sentence each without a period; what the doctor never examines is last."""
        skipped = dict.fromkeys(finding.summary for finding in self.findings if finding.status == "skip")
        return (*skipped, "the job's own code and data")


def examine(
    spec: Spec, cluster: ResolvedCluster, *, skip: Collection[Costly], progress: Progress, gpu: bool = False
) -> Examination:
    """Examine all nodes of a spec.

    Args:
        spec: the checked spec.
        cluster: its nodes.
        skip: layers to leave out; without all of them (`--quick`), fewer ports per pair are tested too.
        progress: called with the current activity.
        gpu: whether each GPU is measured, too.

    Raises:
        DtctlError: of this machine's side; what is wrong with the nodes is in the findings.
    """
    fixed = spec.network.rendezvous_port
    candidates = rendezvous.port_candidates("doctor", 0, fixed if isinstance(fixed, int) else None)[:3]
    wanted = [wanted_of(spec, one, cluster) for one in cluster.nodes]
    quick = set(skip) >= set(COSTLY)
    envs = {one.name: given_to(spec, one) for one in cluster.nodes}
    with contextlib.closing(Probes(wanted, cluster.make_transport(), progress=progress)) as probes:
        reports = probes.look(
            rendezvous=candidates,
            data_ports=QUICK_DATA_PORTS if quick else DATA_PORTS,
            measure_s=0.0 if "links" in skip else MEASURE_S,
            names=names_of(spec, cluster),
            locate=locator(spec, envs),
            spread=QUICK_STRETCHES if quick else STRETCHES,
        )
        findings, ran = _judge(spec, cluster, reports, candidates, envs, measured="links" not in skip)
        folders = list(dict.fromkeys(path for one in wanted for path in one.paths))
        if folders and not quick and len(reports) > 1:
            findings += shared_folders.judge(shared_folders.look(probes, reports, folders))
            ran += shared_folders.RAN
        python = {one.name: one.python or "python3" for one in cluster.nodes}
        gpus: tuple[dict[str, Any], ...] = ()
        if gpu:
            from dtctl.doctor.checks import gpu_speed

            findings += gpu_speed.required(reports)
            measured = gpu_speed.measure(probes, reports, python=python, env=envs, progress=progress)
            findings += gpu_speed.judge(measured)
            ran += gpu_speed.RAN if measured else ()
            gpus = gpu_speed.rows(measured)
        sums = collective.AllReduceResult()
        confirmed: dict[str, Collection[str]] = {}
        if "collective" not in skip and _can_add_up(reports, findings, every_gpu=gpu):
            variables = {one.name: launched_with(spec, one) for one in cluster.nodes}
            sums = collective.add_up(probes, reports, python=python, env=variables, progress=progress, every_gpu=gpu)
            confirmed.update(sums.uses)
            # A node that was lost on the way is not a matter of sums.
            findings += list(node.reach([one for one in reports if one.error is not None])) or sums.findings
            ran += collective.RAN
        if any(one.error is None for one in reports):
            findings += node.python([one for one in reports if one.error is None and one.facts], confirmed)
    lost = coverage.unexamined(reports, skip=skip, ran=ran, rendezvous=bool(candidates), found=findings)
    return Examination(
        findings=tuple(ordered(findings, ran=ran, unexamined=lost)),
        seen=tuple(reports),
        sums=sums.figures,
        gpus=gpus,
    )


def _can_add_up(reports: list[NodeReport], found: list[Finding], *, every_gpu: bool) -> bool:
    """Return whether an all-reduce is possible: several nodes, or one with several GPUs, all well, all with torch."""
    alone = len(reports) < 2 and not (every_gpu and all(one.error is None and one.facts["gpus"] > 1 for one in reports))
    if alone or any(one.status == "fail" for one in found):
        return False
    return all(
        one.error is None and one.facts["job"].get("torch") and not one.facts["job"].get("error") for one in reports
    )


def given_to(spec: Spec, one: NodeSpec) -> dict[str, str]:
    """Return the variables that the spec sets for a node's workers."""
    return {**spec.job.env, **one.env}


def launched_with(spec: Spec, one: NodeSpec) -> dict[str, str]:
    """Return `given_to` with the value of `network.interface`; settings of the spec win, as in a launch."""
    chosen = spec.network.interface
    name = chosen.get(one.name) if isinstance(chosen, Mapping) else chosen
    fixed = {} if name in (None, "auto") else {"GLOO_SOCKET_IFNAME": str(name), NCCL: f"={name}"}
    return {**fixed, **given_to(spec, one)}


def names_of(spec: Spec, cluster: ResolvedCluster) -> list[str]:
    """Return the host names that all nodes should resolve alike: the spec's, and the rendezvous address if a name."""
    meeting = spec.network.rendezvous_address
    return [*(spec_node.name for spec_node in cluster.nodes), "localhost", *([meeting] if meeting else [])]


def _used(
    reports: Iterable[NodeReport], spec: Spec, envs: Mapping[str, Mapping[str, str]]
) -> dict[str, list[UsedInterface]]:
    return {node.name: named_interfaces(node, spec, envs[node.name]) for node in reports}


def locator(spec: Spec, envs: Mapping[str, Mapping[str, str]]) -> Locate:
    """Fills in where workers are called and where they meet, by this spec."""

    def locate(reports: Sequence[NodeReport]) -> None:
        used = _used(reports, spec, envs)
        for report in reports:
            report.data_address = data_address(report, used[report.name])
        for report in reports:
            report.meeting = meeting_address(spec, reports[0], report)

    return locate


def _judge(
    spec: Spec,
    cluster: ResolvedCluster,
    reports: list[NodeReport],
    candidates: tuple[int, ...],
    envs: Mapping[str, Mapping[str, str]],
    *,
    measured: bool,
) -> tuple[list[Finding], list[str]]:
    """Return the findings, and the names of the checks that were made."""
    findings = list(node.reach(reports, node_facts.neighbours()))
    well = [one for one in reports if one.error is None]
    ran = list(node.RAN_REACH)
    if well:
        slots = {one.name: one.slots for one in cluster.nodes if isinstance(one.slots, int)}
        findings += _of_nodes(well, spec, slots)
        findings += environment.environment(well, envs)
        fixed = spec.network.rendezvous_port
        findings += scheduler.scheduler(
            os.environ,
            scheduler.job_of(os.environ),
            node=well[0].name,
            nodes=len(reports),
            kind=spec.job.kind,
            now=time.time(),
            fixed_port=fixed if isinstance(fixed, int) else None,
        )
        ran += [*node.RAN, *hardware.RAN, *environment.RAN, *(scheduler.RAN if "SLURM_JOB_ID" in os.environ else ())]
        used = list(checks_of_used.interfaces(well, _used(well, spec, envs)))
        explained = {name for finding in used for name in finding.nodes}
        head_is_well = well[0] is reports[0]
        meeting: list[Finding] = []
        if head_is_well:
            meeting = list(checks_of_used.meeting(well, spec.network.rendezvous_address))
            used += meeting
        findings += used
        ran += checks_of_used.RAN
    if len(well) > 1:
        findings += network.names(well, [one.name for one in cluster.nodes])
        findings += network.addresses(well)
        findings += network.ports(well)
        if head_is_well:
            fixed = spec.network.rendezvous_port
            judged = list(network.pairs(well, rendezvous=candidates, fixed=isinstance(fixed, int), explained=explained))
            # If the address itself is wrong, the result for its port has no meaning.
            findings += [one for one in judged if not (meeting and one.check == "rendezvous-port" and one.peers)]
        else:  # the head node is away; the others are tested all the same
            findings += network.pairs(well, rendezvous=(), fixed=False, explained=explained)
        findings += links.links(well)
        ran += [*network.RAN, *(links.RAN if measured else ())]
    return findings, ran


def _of_nodes(well: list[NodeReport], spec: Spec, slots: dict[str, int]) -> list[Finding]:
    return [
        *node.limits(well),
        *node.storage(well, spec.cluster.workdir),
        *node.alike(well),
        *node.clock(well),
        *hardware.hardware(well, slots),
    ]


def wanted_of(spec: Spec, one: NodeSpec, cluster: ResolvedCluster) -> NodeQuery:
    """Return what to ask about a node of the spec."""
    data = spec.settings.get("data", {})
    # Relative ones may lie in the code that a launch brings; only absolute ones have to be there now.
    absolute = [value for value in data.values() if isinstance(value, str) and value.startswith(("/", "~"))]
    return NodeQuery(
        target=cluster.targets[one.name],
        python=one.python,
        workdir=one.workdir,
        paths=(*absolute, *(() if spec.pushes else (spec.code_folder,))),
        code="" if spec.pushes else spec.code_folder,
        env=launched_with(spec, one),
        slots=one.slots if isinstance(one.slots, int) else 1,
        beside=tuple(_beside(spec)) if spec.pushes else (),
    )


def _beside(spec: Spec) -> Iterator[tuple[str, str]]:
    """Modules in the folder of the job's script, which Python looks through before its own: name, path."""
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
