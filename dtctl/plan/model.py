"""The plan: what will run where, as plain frozen data.

Everything that acts (dry run, SSH, Slurm) reads this and nothing else, so what a dry run shows is what is sent. A plan
holds no secrets: it names them, and the launcher sends their values separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Literal, NamedTuple

from dtctl.errors import PlanError

Kind = Literal["torchrun", "direct", "deepspeed", "accelerate", "command"]
WORKER_KINDS: Final = frozenset({"direct", "deepspeed", "accelerate"})
"""Kinds whose workers dtctl starts itself, each with its RANK and LOCAL_RANK; unequal slots are fine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedConfig:
    """Variables and arguments made of `train:` for a framework; the same for all workers of a job."""

    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    runtime: bool = False
    """True if it is dtctl.runtime that reads `train:`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """A variable of a worker's environment."""

    name: str
    value: str
    origin: str
    """Source and reason, one phrase: `job.env`, `torch: rendezvous`, `env_from: WANDB_*`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadCount:
    """Number of threads of each worker of a run.

    One number for all workers and attempts, and on nodes that replace others: sums over another number of threads may
    have other bits.
    """

    number: int
    reason: str
    """Reason for the number, a phrase."""


class EnvGroup(NamedTuple):
    """Neighbouring variables of one origin, which a script shows under one comment."""

    origin: str
    variables: tuple[EnvVar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Meeting point of the workers of one attempt; new for every attempt."""

    run_id: str
    """Identifier that no other attempt has, so that a late worker of the previous one is rejected."""
    address: str
    """Numeric address (or, in a dry run without look-ups, the name) of the head node."""
    port: int

    @property
    def endpoint(self) -> str:
        """`address:port`, with an IPv6 address in brackets."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """Part of one node in a plan."""

    name: str
    """Name in the spec; unique."""
    address: str
    """Name or address that the control machine connects to."""
    node_rank: int
    """Position in the spec, from 0; node 0 is the head node."""
    slots: int
    """Workers on this node."""
    first_rank: int
    """Global rank of the worker with local rank 0."""
    workdir: str
    """Folder on the node that holds everything dtctl writes there; `~` is the login user's home."""
    argv: tuple[str, ...]
    """The command started on the node: once (torchrun, command) or once per worker (the other kinds)."""
    processes: int
    """Copies of `argv` that the supervisor starts: 1, or `slots` when each is a worker."""
    env: tuple[EnvVar, ...]
    """Variables exported by the node script, in the order of the script; names are unique."""
    python: str | None = None
    """Interpreter on the node, for dtctl's own part, and for the program unless the job has an environment; None:
    `python3` from its PATH."""
    path: str = ""
    """Folder that comes first on the command's PATH: that of `cluster.python` or of the environment; empty: none."""
    setup: tuple[str, ...] = ()
    """Shell lines that the node script runs before the command (`module load`, `source activate`)."""
    gres: str | None = None
    """Generic resources of the node under Slurm."""

    preload: tuple[str, ...] = ()
    """Modules imported once per node, in a process that the workers are forked from; none: workers start afresh."""
    files: tuple[str, ...] = ()
    """Files, relative to the pushed code, that must be there before any node starts."""
    programs: tuple[str, ...] = ()
    """Programs that must be found on the node's PATH before any node starts."""

    @property
    def env_by_origin(self) -> tuple[EnvGroup, ...]:
        """The environment in the order of the script, neighbours of one origin together."""
        return tuple(
            EnvGroup(origin=origin, variables=tuple(group))
            for origin, group in groupby(self.env, key=lambda variable: variable.origin)
        )

    @property
    def ranks(self) -> range:
        """Global ranks of this node's workers."""
        return range(self.first_rank, self.first_rank + self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An attempt of a run on all its nodes."""

    run: str
    """Run id, unique in this folder: `gpt-1121-093012-k7`."""
    job: str
    kind: Kind
    transport: str
    attempt: int
    """Number of times that the gang was started before in this run; 0 at first."""
    max_restarts: int
    nodes: tuple[NodePlan, ...]
    """Plans of the nodes in node rank order; the first is the head node."""
    rendezvous: Rendezvous
    world_size: int
    grace_s: float
    """Seconds between SIGTERM and SIGKILL when a run is stopped."""
    threads: ThreadCount | None = None
    """Threads of each worker; None: they are not counted from the nodes' cores, or not yet."""
    live: bool = False
    """True if lost workers are replaced while the others stay."""
    secrets: tuple[str, ...] = ()
    """Names of variables; their values are read on the control machine at launch and never written to disk."""
    spec_digest: str = ""
    """BLAKE2 digest of the resolved spec, 16 hexadecimal digits; shown in every script."""
    notes: tuple[str, ...] = field(default=())
    """Notes about choices made here, one sentence each."""

    @property
    def per_worker(self) -> bool:
        """Return whether each worker is started by dtctl, and not by a program that is started once per node."""
        return self.kind in WORKER_KINDS

    @property
    def head(self) -> NodePlan:
        """Return the node with the address of the rendezvous endpoint."""
        return self.nodes[0]


class NodeRanks(NamedTuple):
    """The workers of one node."""

    node: str
    node_rank: int
    slots: int
    first_rank: int


def assign_worker_ranks(slots: Mapping[str, int]) -> tuple[NodeRanks, ...]:
    """Give every worker a rank: node by node in the order of `slots`, and on a node by local rank.

    Args:
        slots: node name -> number of workers, in the order of the spec.

    Raises:
        PlanError: there is no node, or a node has no worker.
    """
    if not slots:
        raise PlanError("the job has no nodes", hint="name them under `cluster.nodes` or with `--nodes`")
    placements = []
    first_rank = 0
    for node_rank, (node, count) in enumerate(slots.items()):
        if count < 1:
            raise PlanError(
                f"node {node} has {count} slots", where=f"node {node}", hint="leave it out of `cluster.nodes`"
            )
        placements.append(NodeRanks(node=node, node_rank=node_rank, slots=count, first_rank=first_rank))
        first_rank += count
    return tuple(placements)


def count_workers(placements: Sequence[NodeRanks]) -> int:
    """Return the number of workers of the job."""
    return sum(placement.slots for placement in placements)


def require_equal_slots(placements: Sequence[NodeRanks], *, kind: str) -> int:
    """Workers per node, the same on all nodes.

    Raises:
        PlanError: they differ. torchrun derives ranks from one number per node.
            Source: torch/distributed/run.py, notice 5, read at torch 2.13.
    """
    counts = {placement.slots for placement in placements}
    if len(counts) > 1:
        listed = ", ".join(f"{placement.node}: {placement.slots}" for placement in placements)
        raise PlanError(
            f"kind {kind} needs the same number of slots on every node, and these have {listed}",
            where="cluster.slots",
            hint="`job.kind: direct` starts the workers without torchrun and allows unequal slots",
        )
    return counts.pop()
