"""The nodes of a spec, their transport (this machine, SSH, Slurm, the sandbox), and the plan before any is called."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dtctl import folders
from dtctl.errors import LaunchError, PlanError
from dtctl.launch import trust
from dtctl.node_facts import count_usable_cores
from dtctl.spec.model import Cluster, Spec, SshClient
from dtctl.spec.nodes import NodeSpec, resolve_nodes, resolve_spares
from dtctl.transport.base import Target, Transport

if TYPE_CHECKING:
    from dtctl.launch.records.record import RunRecord
    from dtctl.plan.environment import MachineShare
    from dtctl.plan.model import Plan
    from dtctl.transport.dial import OpenSocket

SOURCE_BYTES = 32 << 20
"""Most bytes of a script that are read."""
FILES = 256
"""Open files of a launcher without those of its connections."""
FILES_PER_NODE = 5
"""Open files of a connection: three pipes of an ssh process, its log, and one more while the process is started."""
TASKS_PER_NODE = 3
"""Processes and threads of a connection: an ssh process and two threads, or three threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCluster:
    """The nodes of a spec and their transport."""

    nodes: tuple[NodeSpec, ...]
    spares: tuple[NodeSpec, ...] = ()
    targets: Mapping[str, Target]
    """Targets of nodes and spares."""
    make_transport: Callable[[], Transport]
    """Connects to the nodes and imports the modules of the transport, which takes a while; not called in a dry run."""


def resolve_cluster(spec: Spec, *, start: bool, record: RunRecord | None = None) -> ResolvedCluster:
    """Return the nodes that a spec names.

    Args:
        spec: the checked spec.
        start: whether a sandbox may be started for the spec.
        record: the run that the copy of the spec belongs to.

    Raises:
        SpecError: the nodes are not well formed.
        SandboxError: the sandbox cannot be used.
    """
    cluster = _cluster_of(spec, start=start)

    def make_transport() -> Transport:
        # The agreement is needed before ssh reads a configuration that could run commands, and before data are sent.
        trust.require_user_agreement(spec, record)
        return cluster.make_transport()

    return replace(cluster, make_transport=make_transport)


def build_run_cluster(record: RunRecord) -> ResolvedCluster:
    """Return the nodes of a run that was launched before, and their transport.

    Raises:
        SpecError: the copy of its spec is gone or broken.
    """
    from dtctl.launch.run_spec import load_run_spec

    return resolve_cluster(load_run_spec(record), start=False, record=record)


def _cluster_of(spec: Spec, *, start: bool) -> ResolvedCluster:
    if spec.cluster.transport == "sandbox":
        return _resolve_sandbox_cluster(spec, start=start)
    nodes = resolve_nodes(spec)
    spares = resolve_spares(spec)
    targets = _build_node_targets(spec, (*nodes, *spares))
    if spec.cluster.transport == "slurm":
        return ResolvedCluster(nodes=nodes, spares=spares, targets=targets, make_transport=_reject_slurm_transport)
    if spec.cluster.transport == "local":
        return ResolvedCluster(nodes=nodes, targets=targets, make_transport=_make_local_transport)
    first = [targets[node.name] for node in nodes]
    client = spec.cluster.ssh
    return ResolvedCluster(
        nodes=nodes, spares=spares, targets=targets, make_transport=lambda: make_ssh_transport(first, client)
    )


def _reject_slurm_transport() -> Transport:
    raise PlanError(
        "this command needs machines that it can reach, but the nodes of Slurm are known only inside a job",
        where="cluster.transport",
        hint="`dtctl launch`, `status`, `logs`, `watch`, `stop`, `doctor` and `report` know Slurm",
    )


def _make_local_transport() -> Transport:
    from dtctl.transport.local import LocalTransport

    return LocalTransport()


def make_ssh_transport(targets: Iterable[Target], client: SshClient = "auto") -> Transport:
    """Return a transport over SSH to these nodes, which has begun to log in.

    Args:
        targets: the nodes.
        client: as in the spec.

    Raises:
        LaunchError: the limit of open files or of processes is too low for so many connections.
    """
    targets = [*targets]
    _allow_open_files(len(targets))
    _allow_processes(len(targets))
    if choose_client(client) == "openssh":
        from dtctl.transport.openssh import OpenSshTransport

        return OpenSshTransport(targets)
    return _paramiko_transport(targets)


def choose_client(client: SshClient) -> Literal["openssh", "paramiko"]:
    """Return the program that connects to nodes, given the spec's value."""
    if client != "auto":
        return client
    return "openssh" if shutil.which("ssh") else "paramiko"


def _allow_open_files(nodes: int) -> None:
    """Raise the limit of open files to the number that connections to so many nodes need.

    Raises:
        LaunchError: the system's own limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_PER_NODE * nodes
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{nodes} nodes take {needed} open files, and this machine allows {hard}",
            hint=f"raise the limit for your user (`nofile` in /etc/security/limits.conf, `ulimit -Hn`) to {needed}",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _allow_processes(nodes: int) -> None:
    """Raise the limit of the user's processes and threads to the most that the system allows.

    Raises:
        LaunchError: the system allows fewer than connections to so many nodes need.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    needed = TASKS_PER_NODE * nodes
    is_bound = os.geteuid() != 0 and hard != resource.RLIM_INFINITY
    if is_bound and hard < needed:
        raise LaunchError(
            f"{nodes} nodes take {needed} processes and threads, and this machine allows {hard}",
            hint=f"raise the limit for your user (`nproc` in /etc/security/limits.conf, `ulimit -Hu`) by {needed}",
        )
    # The number of the user's other processes is not known, so the limit becomes the highest possible.
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))


def _paramiko_transport(targets: Iterable[Target], connect: OpenSocket | None = None) -> Transport:
    """Return a transport by the library paramiko; `connect` opens a socket to a node, if given."""
    from dtctl.transport.dial import EarlyConnections, open_socket

    connect = connect or open_socket
    early_calls = EarlyConnections(targets, connect)
    # This import takes a while, in which the nodes get ready.
    from dtctl.transport.ssh import SshTransport

    return SshTransport(open_socket=connect, early_calls=early_calls)


def _build_node_targets(spec: Spec, nodes: Sequence[NodeSpec]) -> dict[str, Target]:
    return {
        node.name: build_target(spec.cluster, node.name, address=node.address, user=node.user, port=node.port)
        for node in nodes
    }


def build_target(cluster: Cluster, name: str, *, address: str, user: str | None, port: int | None) -> Target:
    """Return a machine to connect to, with the files of SSH that the spec names."""
    return Target(
        name=name,
        address=address,
        user=user,
        port=port,
        identity_file=str(cluster.identity_file) if cluster.identity_file else None,
        known_hosts=str(cluster.known_hosts) if cluster.known_hosts else None,
        ssh_config=str(cluster.ssh_config) if cluster.ssh_config else None,
        connect_timeout_s=cluster.connect_timeout_s,
    )


def _resolve_sandbox_cluster(spec: Spec, *, start: bool) -> ResolvedCluster:
    """Return the spec's nodes as hosts of the running sandbox.

    Args:
        spec: a spec with `transport: sandbox`.
        start: whether to start a sandbox if none is up. Without a look-up, the names of nodes are used as addresses.

    Raises:
        SandboxError: the sandbox cannot be started here.
        PlanError: the running sandbox lacks nodes that the spec names.
    """
    from dtctl.sandbox import control

    nodes, spares = resolve_nodes(spec), resolve_spares(spec)
    required = (*nodes, *spares)
    name = control.choose_default_name()
    sandbox = control.find_running_sandbox(name)
    if sandbox is None and start:
        sandbox = control.ensure_sandbox_up(name, nodes=len(required))
    if sandbox is None:
        return ResolvedCluster(nodes=nodes, spares=spares, targets={}, make_transport=_reject_stopped_sandbox)
    hosts = {node.name: node for node in sandbox.nodes}
    missing = [node.name for node in required if node.name not in hosts]
    if missing:
        raise PlanError(
            f"the sandbox that is up has no {', '.join(missing)}: its nodes are {', '.join(hosts)}",
            where="cluster.nodes",
            hint=f"for more nodes: `dtctl sandbox down`, then `dtctl sandbox up --nodes {len(required)}`"
            if len(required) > len(hosts)
            else "the nodes of a sandbox are called node1, node2 and so on",
        )
    placed = tuple(_set_node_address(node, hosts[node.name].address) for node in required)
    targets = {
        node.name: Target(
            name=node.name,
            address=host.address,
            user=sandbox.user,
            port=22,
            identity_file=str(sandbox.identity_file),
            known_hosts=str(sandbox.known_hosts),
            ssh_config="none",
            connect_timeout_s=spec.cluster.connect_timeout_s,
        )
        for node in placed
        for host in (hosts[node.name],)
    }

    def make_transport() -> Transport:
        called = [targets[node.name] for node in nodes]
        # Only the keeper of a rootless sandbox can enter its network; it passes sockets to other processes.
        if sandbox.rootless:
            from dtctl.sandbox.world import make_socket_opener

            return _paramiko_transport(called, make_socket_opener(sandbox))
        return make_ssh_transport(called, spec.cluster.ssh)

    count = len(nodes)
    return ResolvedCluster(nodes=placed[:count], spares=placed[count:], targets=targets, make_transport=make_transport)


def _set_node_address(node: NodeSpec, address: str) -> NodeSpec:
    # The virtual hosts share this machine's files, so they have the Python that runs dtctl and its packages.
    return replace(node, address=address, python=node.python or sys.executable)


def _reject_stopped_sandbox() -> Transport:
    raise PlanError("the sandbox is not up", hint="dtctl sandbox up")


def set_cluster_environment(cluster: ResolvedCluster, digest: str, workdir: str = "") -> ResolvedCluster:
    """Return the cluster with nodes that run programs in an environment; see `set_job_python`."""
    return replace(
        cluster,
        nodes=set_job_python(cluster.nodes, digest, workdir),
        spares=set_job_python(cluster.spares, digest, workdir),
    )


def set_job_python(nodes: Iterable[NodeSpec], digest: str, workdir: str = "") -> tuple[NodeSpec, ...]:
    """Return nodes that run programs in an environment below `workdir`; empty: below the workdir of each."""
    from dtctl.supervisor.environments import locate_environment_python

    def add_python(node: NodeSpec) -> NodeSpec:
        top = workdir or node.workdir
        return replace(
            node, job_python=locate_environment_python(top if top.startswith(("/", "~")) else f"~/{top}", digest)
        )

    return tuple(map(add_python, nodes))


def build_first_plan(spec: Spec, cluster: ResolvedCluster, *, run: str) -> Plan:
    """Return the plan as it is known before any node was queried; a dry run shows this plan.

    Raises:
        PlanError: no job can be made from the spec.
    """
    from dtctl.plan.build import PlanFacts, build

    return build(
        spec,
        cluster.nodes,
        run=run,
        facts=PlanFacts(environ=os.environ, share=compute_machine_share(spec), source=read_job_source(spec)),
    )


def compute_machine_share(spec: Spec) -> MachineShare | None:
    """Return the share of this machine that each node has, if all nodes are on this machine."""
    from dtctl.plan.environment import MachineShare

    if spec.cluster.transport == "local":
        return MachineShare(cores=count_usable_cores(), nodes=1, threads=os.environ.get("OMP_NUM_THREADS"))
    if spec.cluster.transport == "sandbox":
        return MachineShare(cores=count_usable_cores(), nodes=len(resolve_nodes(spec)))
    return None


def read_job_source(spec: Spec) -> str:
    """Return the text of the job's script if it is here and the plan depends on its first line or its imports."""
    script = spec.job.script
    if script is None or (script.endswith(".py") and spec.job.kind != "direct"):
        return ""
    try:
        path = spec.base_dir / spec.job.files.root / script
        return folders.read_regular(str(path), SOURCE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
