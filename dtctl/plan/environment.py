"""The environment of a node's workers, every value with its origin.

Later layers win over earlier ones: defaults of dtctl, variables taken from the control machine, `job.env`, the node's
own `env`. A user cannot set the variables of a worker's position in the job (ranks, rendezvous).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dtctl import names, shell
from dtctl.errors import PlanError
from dtctl.plan.model import WORKER_KINDS, EnvVar, NodeRanks, Rendezvous, ThreadCount

RANK_PREFIX = "[dtctl:${rank}] "
"""Prefix that torchrun puts before each line of a worker, for the supervisor to sort lines by rank."""

THREADS = "OMP_NUM_THREADS"
"""Number of threads of OpenMP, which torch uses, too."""
RESERVED = frozenset(
    {
        names.RANK,
        names.LOCAL_RANK,
        names.WORLD_SIZE,
        names.LOCAL_WORLD_SIZE,
        names.GROUP_RANK,
        names.NODE_RANK,
        names.MASTER_ADDR,
        names.MASTER_PORT,
        names.ERROR_FILE,
        "ROLE_RANK",
        "ROLE_NAME",
        "ROLE_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
    }
)
PLACE = "dtctl: place in the job"
"""Origin of variables that follow from a worker's rank and node."""
PYTHON = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}
DEEPSPEED_PLACE = ("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE")
"""Position of the node, number of nodes and workers on the node, which DeepSpeed's launcher sets, too."""
ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ON_CPUS = EnvVar(name="ACCELERATE_USE_CPU", value="true", origin="dtctl: no node has a GPU")
"""Variable without which Accelerate trains one model per worker on machines without GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineShare:
    """Share of this machine that a node on it gets: `transport: local`, and the virtual hosts of a sandbox."""

    cores: int
    """Cores of the machine that dtctl may use."""
    nodes: int
    """Nodes of the spec, among which they are divided."""
    threads: str | None = None
    """OMP_NUM_THREADS of the shell that launches, where workers inherit it."""


def build_default_variables(
    *, kind: str, slots: int, share: MachineShare | None, threads: ThreadCount | None, on_cpus: bool = False
) -> list[EnvVar]:
    """Return the variables that dtctl sets unless they are set otherwise; as few as possible.

    Args:
        kind: of the job.
        slots: workers of the node.
        share: share of the control machine, if the node is on it.
        threads: of each worker, if the nodes were asked for their cores.
        on_cpus: True if no node is known to have a GPU.
    """
    origin = "dtctl: unbuffered output, and the same order of sets in each run"
    variables = [EnvVar(name=name, value=value, origin=origin) for name, value in PYTHON.items()]
    if share is not None:
        variables += _share_of_machine(slots, share)
    elif threads is not None:
        variables.append(_number_of(threads))
    if kind == "torchrun":
        origin = "dtctl: shows the rank of each line"
        variables.append(EnvVar(name="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", value=RANK_PREFIX, origin=origin))
    if kind in WORKER_KINDS:
        # torchrun would set 1, an old default. With 3, torch behaves as without the variable, and programs that look
        # for it find it.
        value, origin = shell.ShellExpansion(f"${{{ASYNC_ERRORS}:-3}}"), "torch's own default, unless the node sets it"
        variables.append(EnvVar(name=ASYNC_ERRORS, value=value, origin=origin))
        signals, origin = "SIGTERM,SIGINT,SIGHUP", "dtctl: signals that torchrun passes on to workers"
        variables.append(EnvVar(name="TORCHELASTIC_SIGNALS_TO_HANDLE", value=signals, origin=origin))
    if kind == "accelerate" and on_cpus:
        variables.append(ON_CPUS)
    return variables


def _share_of_machine(slots: int, share: MachineShare) -> list[EnvVar]:
    """Return OMP_NUM_THREADS if workers share this machine's cores, since torch would use all for each of them."""
    if slots * share.nodes == 1:
        return []
    if share.threads is not None:
        return [EnvVar(name=THREADS, value=share.threads, origin="set in the launching shell")]
    workers = f"{slots} workers" if share.nodes == 1 else f"{share.nodes} nodes of {slots} worker{'s' * (slots > 1)}"
    origin = f"dtctl: {workers} share this machine's {share.cores} core{'s' * (share.cores > 1)}"
    return [EnvVar(name=THREADS, value=str(max(1, share.cores // (share.nodes * slots))), origin=origin)]


def _number_of(threads: ThreadCount) -> EnvVar:
    """Return OMP_NUM_THREADS as counted from the nodes' cores; a value of a node's own set-up is kept."""
    value = shell.ShellExpansion(f"${{{THREADS}:-{threads.number}}}")
    return EnvVar(name=THREADS, value=value, origin=f"dtctl: {threads.reason}, unless the node sets it")


def compute_worker_threads(cores: Mapping[str, int], placements: Sequence[NodeRanks]) -> ThreadCount | None:
    """Return the threads of each worker: the smallest number of cores per worker over all nodes.

    The slowest worker determines the time of a step, so more threads on other nodes would gain little.

    Args:
        cores: node -> cores that its processes may use.
        placements: the workers of each node.

    Returns:
        None if a node has not reported its number of cores.
    """
    if not all(cores.get(placement.node) for placement in placements):
        return None
    least = min(placements, key=lambda placement: cores[placement.node] / placement.slots)
    count = cores[least.node]
    workers = "1 worker has" if least.slots == 1 else f"{least.slots} workers share"
    reason = f"{workers} the {count} core{'s' * (count > 1)} of {least.node}"
    if len(placements) > 1:
        reason += ", the smallest share of all nodes"
    return ThreadCount(number=max(1, count // least.slots), reason=reason)


def select_environ_variables(patterns: Iterable[str], environ: Mapping[str, str]) -> list[EnvVar]:
    """Return the variables of the control machine that match a pattern of `job.env_from`, by name.

    Raises:
        PlanError: the value of one is not text.
    """
    variables = []
    for name in sorted(environ):
        pattern = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        if pattern is not None and shell.is_env_name(name) and not name.startswith("DTCTL_"):
            check_text(name, environ[name], where=f"job.env_from: {pattern}")
            variables.append(EnvVar(name=name, value=environ[name], origin=f"job.env_from: {pattern}"))
    return variables


def read_job_secrets(secrets: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of `job.secrets` from the environment of a launcher.

    Raises:
        PlanError: one of them is not set, or is not text.
    """
    missing = [name for name in secrets if name not in environ]
    if missing:
        raise PlanError(
            f"the job needs {', '.join(missing)}, which is not set here",
            where="job.secrets",
            hint=f"export {missing[0]}=... in the shell that runs dtctl",
        )
    for name in secrets:
        check_text(name, environ[name], where="job.secrets")
    return {name: environ[name] for name in secrets}


def check_text(name: str, value: str, *, where: str) -> None:
    """Refuse a value that cannot be written into a script.

    Raises:
        PlanError: it has bytes that are not UTF-8.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PlanError(f"the value of {name} is not text in UTF-8", where=where) from None


def list_spec_variables(env: Mapping[str, str], *, origin: str) -> list[EnvVar]:
    """Return the variables that the spec sets.

    Raises:
        PlanError: a name is one that dtctl itself sets, or not one that a shell can export.
    """
    for name, value in env.items():
        if name in RESERVED or name.startswith("DTCTL_"):
            raise PlanError(
                f"{name} determines the position of a worker in the job, and dtctl sets it",
                where=f"{origin}.{name}",
                hint="remove it; `dtctl launch --dry-run` shows the value that workers get",
            )
        if not shell.is_env_name(name):
            raise PlanError(f"{name!r} cannot be the name of a variable", where=origin)
        if "\0" in value:
            raise PlanError("a variable cannot hold a NUL character", where=f"{origin}.{name}")
    return [EnvVar(name=name, value=shell.expand_home(value), origin=origin) for name, value in env.items()]


def build_identity_variables(
    *,
    run: str,
    attempt: int,
    kind: str,
    placement: NodeRanks,
    nodes: int,
    world_size: int,
    rendezvous: Rendezvous,
    max_restarts: int,
    rack: str | None = None,
) -> list[EnvVar]:
    """Return the variables of the node's position, for all of its workers; `build_worker_variables` has the others."""
    values = {
        names.RUN_ID: run,
        names.ATTEMPT: str(attempt),
        names.NODE: placement.node,
        names.NODE_INDEX: str(placement.node_rank),
        names.NODES: str(nodes),
        names.SLOTS: str(placement.slots),
    }
    if rack is not None:
        values[names.RACK] = rack
    if kind != "torchrun":
        values |= {names.MASTER_ADDR: rendezvous.address, names.MASTER_PORT: str(rendezvous.port)}
    values |= build_node_variables(
        kind,
        node_rank=str(placement.node_rank),
        nodes=str(nodes),
        slots=str(placement.slots),
        world_size=str(world_size),
        rendezvous_id=rendezvous.run_id,
        attempt=str(attempt),
        max_restarts=str(max_restarts),
    )
    return [EnvVar(name=name, value=value, origin=PLACE) for name, value in values.items()]


def build_node_variables(
    kind: str,
    *,
    node_rank: str,
    nodes: str,
    slots: str,
    world_size: str,
    rendezvous_id: str,
    attempt: str,
    max_restarts: str,
) -> dict[str, str]:
    """Return the variables that launchers of torch set for all workers of a node; the values may be text for a shell.

    Workers that dtctl starts itself get each variable that torchrun sets: programs use them to detect whether they are
    part of a job. Source: torch/distributed/elastic/agent/server/local_elastic_agent.py, torch 2.13.

    Args:
        kind: of the job.
        node_rank: position of the node.
        nodes: number of nodes.
        slots: workers of the node.
        world_size: workers of the job.
        rendezvous_id: id of the attempt's rendezvous.
        attempt: how often the workers were started before.
        max_restarts: how often they may be started again.
    """
    if kind == "torchrun":  # torchrun sets the other variables itself
        return {names.NODE_RANK: node_rank}
    values = {
        names.WORLD_SIZE: world_size,
        names.LOCAL_WORLD_SIZE: slots,
        names.GROUP_RANK: node_rank,
        names.NODE_RANK: node_rank,
    }
    if kind in WORKER_KINDS:
        values |= {
            "GROUP_WORLD_SIZE": nodes,
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": world_size,
            "TORCHELASTIC_RUN_ID": rendezvous_id,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": max_restarts,
            # No agent provides a store, so rank 0 opens it.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
    if kind == "deepspeed":
        values |= dict(zip(DEEPSPEED_PLACE, (node_rank, nodes, slots), strict=True))
    return values


def train_config(train: Mapping[str, Any]) -> list[EnvVar]:
    """Return the spec's `train:` section, for `dtctl.runtime`; empty when the section is."""
    if not train:
        return []
    value = json.dumps(train, sort_keys=True, separators=(",", ":"))
    return [EnvVar(name=names.TRAIN_CONFIG, value=value, origin="spec: train")]


def build_framework_variables(variables: Mapping[str, str], *, framework: str) -> list[EnvVar]:
    """Return the variables of a framework that follow from the spec; `job.env` takes precedence."""
    return [EnvVar(name=name, value=value, origin=f"spec: train, for {framework}") for name, value in variables.items()]


def build_worker_variables(kind: str, *, rank: str, local_rank: str) -> dict[str, str]:
    """Return the variables of one worker of a node that dtctl starts itself; values may be text for a shell."""
    if kind not in WORKER_KINDS:
        return {}
    return {names.RANK: rank, names.LOCAL_RANK: local_rank, "ROLE_RANK": rank}


def merge_variables(*layers: Iterable[EnvVar]) -> tuple[EnvVar, ...]:
    """Return one variable per name with the value of the last layer, in the order in which names first appear."""
    merged: dict[str, EnvVar] = {}
    for layer in layers:
        for variable in layer:
            merged[variable.name] = variable
    return tuple(merged.values())
