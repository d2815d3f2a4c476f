"""The entry point from a checked spec to a plan. Pure: facts about the environment are passed in."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtctl import node_facts, shell
from dtctl.errors import PlanError
from dtctl.plan import environment as env
from dtctl.plan.bind import AttemptFacts, NodeTemplate, PlanTemplate, bind_plan
from dtctl.plan.commands import UserProgram, choose_interpreter
from dtctl.plan.model import (
    WORKER_KINDS,
    EnvVar,
    GeneratedConfig,
    Kind,
    NodeRanks,
    Plan,
    Rendezvous,
    ThreadCount,
    assign_worker_ranks,
    count_workers,
    require_equal_slots,
)
from dtctl.plan.rendezvous import build_rendezvous, list_rendezvous_ports, resolve_numeric_address
from dtctl.plan.warnings import list_warnings
from dtctl.spec.model import Spec
from dtctl.spec.nodes import NodeSpec

if TYPE_CHECKING:
    from dtctl.plan.recovery import RecoveryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Facts that a plan needs and the spec does not have; every field has a value for a dry run without any node."""

    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment of the control machine, for `job.env_from`."""
    address: str | None = None
    """Numeric address of the head node; None: look its name up here."""
    port: int | None = None
    """Port found free on the head node; None: the first port to try."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Node -> GPUs found on it, for `slots: auto`; a node that is not here counts as one without GPUs."""
    cores: Mapping[str, int] = field(default_factory=dict)
    """Node -> cores that its processes may use, as found on it."""
    threads: ThreadCount | None = None
    """Threads that an earlier attempt of the run has counted; they hold for all attempts."""
    share: env.MachineShare | None = None
    """Share of the control machine that each node has; None: the nodes are separate machines."""
    source: str = ""
    """Text of the job's script, for the modules that it imports; empty when there is none."""


_TAKES_ARGUMENTS = r"\$\{?[@*1-9#]"
"""Pattern of arguments in a line for a shell."""


def build(spec: Spec, nodes: Sequence[NodeSpec], *, run: str, attempt: int = 0, facts: PlanFacts | None = None) -> Plan:
    """Return what will run where; see `make_template` for arguments and errors."""
    facts = facts or PlanFacts()
    template, meeting = make_template(spec, nodes, run=run, attempt=attempt, facts=facts)
    return bind_plan(
        template,
        AttemptFacts(number=attempt, rendezvous=meeting, gpus=facts.gpus, cores=facts.cores, threads=facts.threads),
    )


def make_template(
    spec: Spec, nodes: Sequence[NodeSpec], *, run: str, attempt: int = 0, facts: PlanFacts
) -> tuple[PlanTemplate, Rendezvous]:
    """Make the template of a run's plans, and the rendezvous of an attempt.

    Args:
        spec: the checked spec.
        nodes: its nodes, resolved; the first is the head node.
        run: run id.
        attempt: how often the gang was started before in this run.
        facts: facts about this machine and the nodes.

    Raises:
        PlanError: no job can be made of this, or its workers would refuse their mesh or batch.
    """
    kind = _choose_job_kind(spec, facts.source)
    _check_transport(spec, nodes)
    placements = assign_worker_ranks(
        {node.name: _count_node_slots(node, facts, {**spec.job.env, **node.env}) for node in nodes}
    )
    if kind == "torchrun":
        require_equal_slots(placements, kind=kind)
    head = nodes[0]
    fixed = spec.network.rendezvous_port
    port = facts.port or list_rendezvous_ports(run, attempt, fixed if isinstance(fixed, int) else None)[0]
    meeting = build_rendezvous(
        run,
        attempt,
        address=spec.network.rendezvous_address or facts.address or resolve_numeric_address(head.address),
        port=port,
    )
    total = count_workers(placements)
    slots_known = all(isinstance(node.slots, int) or node.name in facts.gpus for node in nodes)
    generated = _generate_needed_input(spec, kind, placements, slots_known=slots_known)
    program = _build_job_program(spec, generated, facts.source)
    training: list[str] = []
    # Later attempts may have fewer workers, and the script may allow for that, so the workers check it.
    if generated.runtime and slots_known and attempt == 0:
        from dtctl.plan.training import check_training

        sizes = {placement.slots for placement in placements}
        training = check_training(spec, workers=total, per_node=sizes.pop() if len(sizes) == 1 else 0, nodes=len(nodes))
    costs = _resolve_plan_recovery(spec, kind, facts.source, workers=total)
    template = PlanTemplate(
        run=run,
        job=spec.job.name,
        kind=kind,
        transport=spec.cluster.transport,
        max_restarts=spec.max_restarts,
        grace_s=spec.job.grace_s,
        secrets=tuple(spec.job.secrets),
        spec_digest=compute_spec_digest(spec),
        live=costs is not None and costs.live,
        program=program,
        share=facts.share,
        nodes=tuple(
            _build_node_template(spec, kind, node, placement, program, generated, facts)
            for node, placement in zip(nodes, placements, strict=True)
        ),
        notes=(
            *([costs.note] if costs is not None and costs.note else []),
            *list_warnings(spec, nodes, per_worker=kind in WORKER_KINDS),
            *_collect_plan_notes(spec, kind, nodes, meeting, facts),
            *_program_notes(spec, kind, program),
            *generated.notes,
            *training,
        ),
    )
    return template, meeting


def _resolve_plan_recovery(spec: Spec, kind: Kind, source: str, *, workers: int) -> RecoveryPlan | None:
    """Return a sentence about the recovery from a lost worker; None without a training."""
    has_own_loop = False
    if "dtctl.runtime" in source:
        from dtctl.plan.preload import imports_session

        has_own_loop = imports_session(source)
    if spec.train is None and spec.job.recovery != "live" and not has_own_loop:
        return None
    from dtctl.plan.recovery import resolve_recovery

    return resolve_recovery(spec, kind, workers=workers, has_own_loop=has_own_loop)


def compute_spec_digest(spec: Spec) -> str:
    """Return the digest of the resolved spec: 16 hexadecimal digits, equal if and only if the specs are equivalent.

    Keys at their defaults do not count, so that a version with more keys gives the same digest.
    """
    return hashlib.blake2b(
        spec.model_dump_json(exclude={"base_dir"}, exclude_defaults=True).encode(), digest_size=8
    ).hexdigest()


def _build_node_template(
    spec: Spec,
    kind: Kind,
    node: NodeSpec,
    placement: NodeRanks,
    program: UserProgram,
    generated: GeneratedConfig,
    facts: PlanFacts,
) -> NodeTemplate:
    variables = env.merge_variables(
        env.build_framework_variables(generated.env, framework=kind),
        env.select_environ_variables(spec.job.env_from, facts.environ),
        _build_interface_variables(spec, node),
        env.list_spec_variables(spec.job.env, origin="job.env"),
        env.list_spec_variables(node.env, origin=f"cluster.nodes: {node.name}"),
        env.train_config(spec.settings),
    )
    script = spec.job.script
    return NodeTemplate(
        name=node.name,
        address=node.address,
        slots=placement.slots,
        workdir=node.workdir,
        python=node.python,
        env=tuple(variable for variable in variables if variable.name not in spec.job.secrets),
        setup=tuple(spec.job.setup),
        path=_choose_path_folder(kind, node),
        gres=node.gres,
        rack=node.rack,
        preload=_choose_preload_modules(spec, kind, placement, facts) if program.is_python else (),
        files=(script,) if script else (),
        job_python=node.job_python,
    )


def _choose_path_folder(kind: Kind, node: NodeSpec) -> str:
    """Folder that comes first on the PATH of the program; empty: none."""
    if node.job_python is not None:  # a node with its own Python uses the programs next to it, whatever the kind of job
        return posixpath.dirname(node.job_python)
    return posixpath.dirname(node.python) if kind == "command" and node.python else ""


def _choose_preload_modules(spec: Spec, kind: Kind, placement: NodeRanks, facts: PlanFacts) -> tuple[str, ...]:
    """Return modules to import once for all workers of a node; empty if useless, or if the set-up depends on ranks."""
    job = spec.job
    shared = kind == "direct" and (placement.slots > 1 or job.max_restarts > 0 or job.recovery == "live")
    if not shared or any("RANK" in line for line in job.setup):
        return ()
    if job.preload is not None:
        return tuple(job.preload)
    from dtctl.plan.preload import find_preload_modules

    return find_preload_modules(facts.source)


def _choose_job_kind(spec: Spec, source: str) -> Kind:
    job = spec.job
    other = job.command or (job.script and choose_interpreter(job.script, source))
    return job.kind or ("command" if other else "torchrun")


def _generate_needed_input(
    spec: Spec, kind: Kind, placements: Sequence[NodeRanks], *, slots_known: bool
) -> GeneratedConfig:
    needs_generation = spec.train is not None or spec.job.add_args or spec.job.deepspeed
    if not needs_generation and kind not in ("accelerate", "deepspeed"):
        return GeneratedConfig()
    from dtctl.plan.generated import generate_framework_input

    return generate_framework_input(spec, kind, placements, slots_known=slots_known)


def _build_job_program(spec: Spec, generated: GeneratedConfig, source: str) -> UserProgram:
    job = spec.job
    if not (job.script or job.module or job.command):
        raise PlanError(
            "the job has nothing to run",
            where="job",
            hint="set one of `job.script`, `job.module` and `job.command`",
        )
    args = (*generated.args, *map(shell.expand_home, job.args))
    if job.shell and args and not re.search(_TAKES_ARGUMENTS, job.command[0] if job.command else ""):
        raise PlanError(
            "the shell line of the job does not use arguments",
            where="job.command",
            hint='write `"$@"` into it where they are needed',
        )
    return UserProgram(
        script=job.script,
        module=job.module,
        command=tuple(job.command or ()),
        args=args,
        shell=job.shell,
        interpreter=choose_interpreter(job.script, source) if job.script else (),
    )


def _count_node_slots(node: NodeSpec, facts: PlanFacts, given: Mapping[str, str]) -> int:
    return node.slots if isinstance(node.slots, int) else max(1, _count_spec_gpus(node, facts, given) or 0)


def _count_spec_gpus(node: NodeSpec, facts: PlanFacts, given: Mapping[str, str]) -> int | None:
    """Return the number of GPUs that workers of a node can use; None before it is counted."""
    count = facts.gpus.get(node.name)
    # The node has counted its GPUs with its own variables; the variables of the job may hide some of them.
    return None if count is None else node_facts.count_visible_gpus(given, count)


def _build_interface_variables(spec: Spec, node: NodeSpec) -> list[EnvVar]:
    """Return the interface that the spec names for this node; nothing when it is found on the node at launch."""
    chosen = spec.network.interface
    name = chosen.get(node.name) if isinstance(chosen, Mapping) else chosen
    if name is None or name == "auto":
        return []
    origin = "network.interface"
    return [
        EnvVar(name="GLOO_SOCKET_IFNAME", value=name, origin=origin),
        # "=" means this name; without it NCCL takes every interface with this prefix (nccl-tests#9).
        EnvVar(name="NCCL_SOCKET_IFNAME", value=f"={name}", origin=origin),
    ]


def _check_transport(spec: Spec, nodes: Sequence[NodeSpec]) -> None:
    transport = spec.cluster.transport
    if transport == "local" and len(nodes) > 1:
        raise PlanError(
            f"transport local is this machine alone, and the spec has {len(nodes)} nodes",
            where="cluster.transport",
            hint="use `transport: ssh`, or `transport: sandbox` for virtual hosts on this machine",
        )
    if spec.is_plain and len({(node.slots, node.gres, node.python, *sorted(node.env.items())) for node in nodes}) > 1:
        raise PlanError(
            f"{spec.plain_reason}, and srun then starts the same workers on every node",
            where=spec.written_at("cluster.nodes"),
            hint="give all nodes the same slots, gres, python and env",
        )
    if spec.is_plain and spec.job.environment is not None:
        raise PlanError(
            f"{spec.plain_reason}, and no launcher in the job makes an environment",
            where=spec.written_at("job.environment"),
            hint="make it (`uv venv`, `uv pip sync`), and set `cluster.python` to its Python",
        )
    if transport == "slurm" and spec.job.data:
        raise PlanError(
            "data is not sent to the nodes of a Slurm job, which share a disk",
            where=spec.written_at("job.data"),
            hint="put it there, and give its path to the program in `job.args` or `job.env`",
        )


def _program_notes(spec: Spec, kind: Kind, program: UserProgram) -> list[str]:
    if not program.interpreter:
        return []
    often = "once per worker" if kind in WORKER_KINDS else "once per node"
    return [f"{spec.job.script} is run by {program.interpreter[0]}, {often}"]


def _collect_plan_notes(
    spec: Spec, kind: Kind, nodes: Sequence[NodeSpec], meeting: Rendezvous, facts: PlanFacts
) -> list[str]:
    notes = []
    unknown = [node.name for node in nodes if not isinstance(node.slots, int) and node.name not in facts.gpus]
    if unknown and spec.cluster.transport == "slurm":
        notes.append("slots: auto is the number of GPUs in slurm.gres; there is none, so one worker a node is started")
    elif unknown:
        notes.append(f"slots: auto is counted on the nodes at launch; 1 is shown for {', '.join(unknown)}")
    if facts.port is None and not isinstance(spec.network.rendezvous_port, int):
        low, high = node_facts.FIRST_PORT, node_facts.LAST_PORT
        notes.append(
            f"a launch takes a port from {low} to {high} that is free on {nodes[0].name} then, another one for each "
            "run and attempt (network.rendezvous_port fixes it)"
        )
    if spec.cluster.transport == "ssh" and not (facts.cores or facts.threads or env.THREADS in spec.job.env):
        notes.append(f"{env.THREADS} is each worker's share of its node's cores, which are counted there at launch")
    if spec.network.interface == "auto":
        notes.append(f"every node finds its interface towards {meeting.address} when it starts")
    if spec.settings.get("strategy") == "auto" and kind in ("torchrun", "direct"):
        notes.append(
            "strategy: auto is decided by the workers, which know model and memory: the first of ddp, zero1, hsdp and "
            "fsdp that fits"
        )
    return notes
