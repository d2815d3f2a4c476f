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
MAX_BESIDE = 1000
MEASURE_S = 0.3
"""How long the bandwidth of a way is measured: within 10 % of what iperf3 finds in seconds, and 16 nodes take 15 s."""


Costly = Literal["links", "collective"]
COSTLY: tuple[Costly, ...] = get_args(Costly)
"""Layers that take more than a moment, which the quick examination leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What came of it."""

    findings: tuple[Finding, ...]
    seen: tuple[NodeReport, ...]
    sums: dict[str, Any] = field(default_factory=dict)
    """`backend`, `bytes`, `seconds` and `busbw_gb_s` of an all_reduce over all nodes; empty when there was none."""
    gpus: tuple[dict[str, Any], ...] = ()
    """With `--gpu`, for each GPU: `node`, `gpu` (its index), `name`, `tflops`, `to_gb_s` and `from_gb_s` (from and to
    the host), `within_gb_s`, and `busbw_gb_s` of an all_reduce over the GPUs of its node."""

    @property
    def ok(self) -> bool:
        """Whether nothing has failed of what was examined."""
        return not any(finding.status == "fail" for finding in self.findings)

    @property
    def not_examined(self) -> tuple[str, ...]:
        """What nobody has looked at, one sentence each without a point; what no doctor looks at comes last."""
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
        progress: told what is going on.
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
        seen = probes.look(
            rendezvous=candidates,
            data_ports=QUICK_DATA_PORTS if quick else DATA_PORTS,
            measure_s=0.0 if "links" in skip else MEASURE_S,
            names=names_of(spec, cluster),
            locate=locator(spec, envs),
        )
        found, ran = _judge(spec, cluster, seen, candidates, envs, measured="links" not in skip)
        folders = list(dict.fromkeys(path for one in wanted for path in one.paths))
        if folders and not quick and len(seen) > 1:
            found += shared_folders.judge(shared_folders.look(probes, seen, folders))
            ran += shared_folders.RAN
        python = {one.name: one.python or "python3" for one in cluster.nodes}
        gpus: tuple[dict[str, Any], ...] = ()
        if gpu:
            from dtctl.doctor.checks import gpu_speed

            found += gpu_speed.required(seen)
            measured = gpu_speed.measure(probes, seen, python=python, env=envs, progress=progress)
            found += gpu_speed.judge(measured)
            ran += gpu_speed.RAN if measured else ()
            gpus = gpu_speed.rows(measured)
        sums = collective.AllReduceResult()
        confirmed: dict[str, Collection[str]] = {}
        if "collective" not in skip and _can_add_up(seen, found):
            variables = {one.name: launched_with(spec, one) for one in cluster.nodes}
            sums = collective.add_up(probes, seen, python=python, env=variables, progress=progress)
            confirmed.update(sums.uses)
            # A node that was lost on the way is not a matter of sums.
            found += list(node.reach([one for one in seen if one.error is not None])) or sums.findings
            ran += collective.RAN
        if any(one.error is None for one in seen):
            found += node.python([one for one in seen if one.error is None and one.facts], confirmed)
    left_out = _left_out(seen, skip, ran)
    return Examination(
        findings=tuple(ordered(found, ran=ran, left_out=left_out)),
        seen=tuple(seen),
        sums=sums.figures,
        gpus=gpus,
    )


def _left_out(seen: Collection[NodeReport], skip: Collection[Costly], ran: Collection[str]) -> dict[str, str]:
    """Checks that were not made, or had nothing to look at -> why."""
    well = [one for one in seen if one.error is None]
    found: dict[str, str] = {}
    if len(seen) < 2:
        alone = "there is one node, and nothing between nodes to look at"
        found |= dict.fromkeys((*network.RAN, *links.RAN, *collective.RAN), alone)
    elif "links" in skip:
        found |= dict.fromkeys(links.RAN, "bandwidth, loss and delay between nodes were left out")
    if len(seen) > 1 and "collective" not in ran:
        without = [one.name for one in well if not one.facts["job"].get("torch")]
        if "collective" in skip:
            why = "torch was not run"
        elif without:
            why = f"torch was not run: the job's Python has none on {', '.join(without)}"
        else:
            why = "torch was not run, because of what has failed"
        found["collective"] = why
    if well and not any(one.facts["gpus"] for one in well):
        found |= dict.fromkeys((name for name in hardware.RAN if name.startswith("gpu")), "no node shows a GPU")
    silent = [one.name for one in well if one.facts["gpus"] and not one.facts["xid_source"]]
    if silent:
        found["gpu-xid"] = (
            f"the kernel's messages may not be read on {', '.join(silent)}: GPU errors were not looked for"
        )
    if well and not any(one.facts["rdma"] for one in well):
        found["rdma"] = "no node has an InfiniBand or RoCE port"
    return found


def _can_add_up(seen: list[NodeReport], found: list[Finding]) -> bool:
    """Whether everything below holds: several nodes, all well, all with torch."""
    if len(seen) < 2 or any(one.status == "fail" for one in found):
        return False
    return all(
        one.error is None and one.facts["job"].get("torch") and not one.facts["job"].get("error") for one in seen
    )


def given_to(spec: Spec, one: NodeSpec) -> dict[str, str]:
    """The variables that the spec sets for a node's workers."""
    return {**spec.job.env, **one.env}


def launched_with(spec: Spec, one: NodeSpec) -> dict[str, str]:
    """As `given_to`, with what `network.interface` becomes; what the spec sets wins, as in a launch."""
    chosen = spec.network.interface
    name = chosen.get(one.name) if isinstance(chosen, Mapping) else chosen
    fixed = {} if name in (None, "auto") else {"GLOO_SOCKET_IFNAME": str(name), NCCL: f"={name}"}
    return {**fixed, **given_to(spec, one)}


def names_of(spec: Spec, cluster: ResolvedCluster) -> list[str]:
    """Host names that the nodes should know alike: the spec's, and the rendezvous address if it is one."""
    meeting = spec.network.rendezvous_address
    return [*(one.name for one in cluster.nodes), "localhost", *([meeting] if meeting else [])]


def _used(
    seen: Iterable[NodeReport], spec: Spec, envs: Mapping[str, Mapping[str, str]]
) -> dict[str, list[UsedInterface]]:
    return {node.name: named_interfaces(node, spec, envs[node.name]) for node in seen}


def locator(spec: Spec, envs: Mapping[str, Mapping[str, str]]) -> Locate:
    """Fills in where workers are called and where they meet, by this spec."""

    def locate(seen: Sequence[NodeReport]) -> None:
        used = _used(seen, spec, envs)
        for one in seen:
            one.data_address = data_address(one, used[one.name])
        for one in seen:
            one.meeting = meeting_address(spec, seen[0], one)

    return locate


def _judge(
    spec: Spec,
    cluster: ResolvedCluster,
    seen: list[NodeReport],
    candidates: tuple[int, ...],
    envs: Mapping[str, Mapping[str, str]],
    *,
    measured: bool,
) -> tuple[list[Finding], list[str]]:
    """The findings, and the names of the checks that were made."""
    found = list(node.reach(seen, node_facts.neighbours()))
    well = [one for one in seen if one.error is None]
    ran = list(node.RAN_REACH)
    if well:
        slots = {one.name: one.slots for one in cluster.nodes if isinstance(one.slots, int)}
        found += _of_nodes(well, spec, slots)
        found += environment.environment(well, envs)
        fixed = spec.network.rendezvous_port
        found += scheduler.scheduler(
            os.environ,
            scheduler.job_of(os.environ),
            node=well[0].name,
            nodes=len(seen),
            kind=spec.job.kind,
            now=time.time(),
            fixed_port=fixed if isinstance(fixed, int) else None,
        )
        ran += [*node.RAN, *hardware.RAN, *environment.RAN, *(scheduler.RAN if "SLURM_JOB_ID" in os.environ else ())]
        used = list(checks_of_used.interfaces(well, _used(well, spec, envs)))
        explained = {name for finding in used for name in finding.nodes}
        head_is_well = well[0] is seen[0]
        meeting: list[Finding] = []
        if head_is_well:
            meeting = list(checks_of_used.meeting(well, spec.network.rendezvous_address))
            used += meeting
        found += used
        ran += checks_of_used.RAN
    if len(well) > 1:
        found += network.names(well, [one.name for one in cluster.nodes])
        found += network.addresses(well)
        found += network.ports(well)
        if head_is_well:
            fixed = spec.network.rendezvous_port
            judged = list(network.pairs(well, rendezvous=candidates, fixed=isinstance(fixed, int), explained=explained))
            # Where the address itself is wrong, its port says nothing.
            found += [one for one in judged if not (meeting and one.check == "rendezvous-port" and one.peers)]
        else:  # the head node is away; the others are tested all the same
            found += network.pairs(well, rendezvous=(), fixed=False, explained=explained)
        found += links.links(well)
        ran += [*network.RAN, *(links.RAN if measured else ())]
    return found, ran


def _of_nodes(well: list[NodeReport], spec: Spec, slots: dict[str, int]) -> list[Finding]:
    return [
        *node.limits(well),
        *node.storage(well, spec.cluster.workdir),
        *node.alike(well),
        *node.clock(well),
        *hardware.hardware(well, slots),
    ]


def wanted_of(spec: Spec, one: NodeSpec, cluster: ResolvedCluster) -> NodeQuery:
    """What to ask about a node of the spec."""
    data = spec.settings.get("data", {})
    root = spec.job.files.root
    # Relative ones may lie in the code that a launch brings; only absolute ones have to be there now.
    absolute = [value for value in data.values() if isinstance(value, str) and value.startswith(("/", "~"))]
    return NodeQuery(
        target=cluster.targets[one.name],
        python=one.python,
        workdir=one.workdir,
        paths=(*absolute, *(() if spec.pushes else (root,))),
        code="" if spec.pushes else root,
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
