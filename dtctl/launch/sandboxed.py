"""The nodes of a spec with `transport: sandbox`: virtual hosts on this machine, started when they are not up yet."""

from __future__ import annotations

import sys
from dataclasses import replace

from dtctl.errors import PlanError
from dtctl.launch.assemble import Cluster, ssh_transport
from dtctl.sandbox import control
from dtctl.spec.model import Spec
from dtctl.spec.nodes import NodeSpec, resolve_nodes, resolve_spares
from dtctl.transport.base import Target, Transport

DEFAULT_NODES = 3


def sandbox_cluster(spec: Spec, *, start: bool) -> Cluster:
    """The spec's nodes as hosts of the running sandbox.

    Args:
        spec: a spec with `transport: sandbox`.
        start: whether to start a sandbox if none is up; without, names stand for the addresses that are not known yet.

    Raises:
        SandboxError: it cannot be started here.
        PlanError: the running sandbox lacks nodes that the spec names.
    """
    nodes, spares = resolve_nodes(spec), resolve_spares(spec)
    wanted = (*nodes, *spares)
    name = control.default_name()
    sandbox = control.find(name)
    if sandbox is None and start:
        sandbox = control.up_or_running(name, nodes=len(wanted))
    if sandbox is None:
        return Cluster(nodes=nodes, spares=spares, targets={}, make_transport=_never)
    hosts = {node.name: node for node in sandbox.nodes}
    missing = [node.name for node in wanted if node.name not in hosts]
    if missing:
        raise PlanError(
            f"the sandbox that is up has no node {', '.join(missing)} (it has {', '.join(hosts)})",
            where="cluster.nodes",
            hint=f"`dtctl sandbox down`, then `dtctl sandbox up --nodes {len(wanted)}`",
        )
    placed = tuple(_placed(node, hosts[node.name].address) for node in wanted)
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
        from dtctl.sandbox.world import opener

        return ssh_transport([targets[node.name] for node in nodes], opener(sandbox))

    count = len(nodes)
    return Cluster(nodes=placed[:count], spares=placed[count:], targets=targets, make_transport=make_transport)


def _placed(node: NodeSpec, address: str) -> NodeSpec:
    # The virtual hosts share this machine's files, so they have the Python that runs dtctl and what is installed there.
    return replace(node, address=address, python=node.python or sys.executable)


def _never() -> Transport:
    raise PlanError("the sandbox is not up", hint="dtctl sandbox up")
