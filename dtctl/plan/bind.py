"""Binding of a plan: from its template to one attempt, with the facts that are known where the workers start.

build.py makes the template from a spec, on the control machine. It omits names and addresses of nodes, the rendezvous,
the attempt's number, cores and GPUs. A launcher inside a Slurm job finds these facts there, and needs neither the spec
nor the modules that read it. Standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dtctl import node_facts
from dtctl.plan import environment as env
from dtctl.plan.commands import UserProgram, build_node_argv
from dtctl.plan.model import (
    WORKER_KINDS,
    EnvVar,
    Kind,
    NodePlan,
    NodeRanks,
    Plan,
    Rendezvous,
    ThreadCount,
    assign_worker_ranks,
    count_workers,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTemplate:
    """Part of a node in every attempt; see `NodePlan` for the fields of the same names."""

    name: str
    address: str
    slots: int
    workdir: str
    python: str | None
    env: tuple[EnvVar, ...]
    """Variables that do not depend on the position of the node."""
    setup: tuple[str, ...]
    path: str
    gres: str | None
    rack: str | None
    """Name shared by nodes that may be lost together (a rack); None: not known."""
    preload: tuple[str, ...]
    files: tuple[str, ...]
    job_python: str | None = None
    """Interpreter of the program, where that is not `python`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTemplate:
    """Common part of all attempts of a run; see `Plan` for the fields of the same names."""

    run: str
    job: str
    kind: Kind
    transport: str
    max_restarts: int
    grace_s: float
    secrets: tuple[str, ...]
    spec_digest: str
    live: bool
    notes: tuple[str, ...]
    program: UserProgram
    share: env.MachineShare | None
    """Share of the control machine that each node has; None: the nodes are separate machines."""
    nodes: tuple[NodeTemplate, ...]
    """Templates of the nodes, by node rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """Facts about one attempt that a plan needs."""

    number: int
    rendezvous: Rendezvous
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Node -> GPUs found on it."""
    cores: Mapping[str, int] = field(default_factory=dict)
    """Node -> cores that its processes may use, as found on it."""
    threads: ThreadCount | None = None
    """Threads that an earlier attempt of the run has counted; they hold for all attempts."""


def bind_plan(template: PlanTemplate, attempt: AttemptFacts) -> Plan:
    """Return the plan of an attempt.

    Raises:
        PlanError: the kind of the job cannot run its program.
    """
    placements = assign_worker_ranks({node.name: node.slots for node in template.nodes})
    threads = None if template.share else attempt.threads or env.compute_worker_threads(attempt.cores, placements)
    total = count_workers(placements)
    on_cpus = all(_count_template_gpus(node, attempt.gpus) == 0 for node in template.nodes)
    nodes = []
    for node, placement in zip(template.nodes, placements, strict=True):
        variables = env.merge_variables(
            env.build_default_variables(
                kind=template.kind, slots=placement.slots, share=template.share, threads=threads, on_cpus=on_cpus
            ),
            node.env,
            env.build_identity_variables(
                run=template.run,
                attempt=attempt.number,
                kind=template.kind,
                placement=placement,
                nodes=len(placements),
                world_size=total,
                rendezvous=attempt.rendezvous,
                max_restarts=template.max_restarts,
                rack=node.rack,
            ),
        )
        nodes.append(_build_node_plan(template, node, placement, attempt.rendezvous, variables))
    return Plan(
        run=template.run,
        job=template.job,
        kind=template.kind,
        transport=template.transport,
        attempt=attempt.number,
        max_restarts=template.max_restarts,
        nodes=tuple(nodes),
        rendezvous=attempt.rendezvous,
        world_size=total,
        grace_s=template.grace_s,
        threads=threads,
        secrets=template.secrets,
        spec_digest=template.spec_digest,
        live=template.live,
        notes=template.notes,
    )


def _build_node_plan(
    template: PlanTemplate, node: NodeTemplate, placement: NodeRanks, meeting: Rendezvous, env: tuple[EnvVar, ...]
) -> NodePlan:
    argv = build_node_argv(
        template.program,
        kind=template.kind,
        python=node.job_python or node.python,
        placement=placement,
        nodes=len(template.nodes),
        rendezvous=meeting,
    )
    return NodePlan(
        name=node.name,
        address=node.address,
        node_rank=placement.node_rank,
        slots=placement.slots,
        first_rank=placement.first_rank,
        workdir=node.workdir,
        argv=argv,
        processes=placement.slots if template.kind in WORKER_KINDS else 1,
        env=tuple(variable for variable in env if variable.name not in template.secrets),
        python=node.python,
        setup=node.setup,
        path=node.path,
        gres=node.gres,
        preload=node.preload,
        files=node.files,
        # Setup lines may change the PATH, so the program can only be looked up after they have run.
        programs=() if node.setup else (argv[0],),
    )


def _count_template_gpus(node: NodeTemplate, found: Mapping[str, int]) -> int | None:
    """Return the number of GPUs that workers of a node can use; None before it is counted."""
    count = found.get(node.name)
    # The node has counted its GPUs with its own variables; the variables of the job may hide some of them.
    given = {variable.name: variable.value for variable in node.env}
    return None if count is None else node_facts.count_visible_gpus(given, count)


def encode_template(template: PlanTemplate) -> dict[str, Any]:
    """Return a template as a JSON object."""
    return asdict(template)


def parse_plan_template(document: Mapping[str, Any]) -> PlanTemplate:
    """Return the template that `encode_template` has made an object of.

    Raises:
        KeyError, TypeError: the object is not from `encode_template`.
    """
    values = {**document}
    values["nodes"] = tuple(
        NodeTemplate(
            **{
                **_convert_lists_to_tuples(NodeTemplate, node),
                "env": tuple(EnvVar(**variable) for variable in node["env"]),
            }
        )
        for node in document["nodes"]
    )
    values["program"] = UserProgram(**_convert_lists_to_tuples(UserProgram, document["program"]))
    values["share"] = None if document["share"] is None else env.MachineShare(**document["share"])
    return PlanTemplate(**_convert_lists_to_tuples(PlanTemplate, values))


def _convert_lists_to_tuples(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass with tuples where JSON has lists."""
    known = {each.name for each in fields(kind)}
    return {name: tuple(each) if isinstance(each, list) else each for name, each in values.items() if name in known}
