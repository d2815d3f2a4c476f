"""From `cluster.nodes` to nodes: ranges expanded, defaults filled in, doubles refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from dtctl.errors import SpecError
from dtctl.spec import hostfile, nodeset
from dtctl.spec.model import Cluster, NodeEntry, Spec

# A node's name becomes the name of a folder, and an argument of programs.
_SAFE = re.compile(r"[A-Za-z0-9_\u0080-\U0010ffff][^\s/\\\x00-\x1f\x7f]{0,252}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One node, with all that the spec says about it."""

    name: str
    address: str
    slots: int | Literal["auto"]
    workdir: str
    user: str | None = None
    port: int | None = None
    python: str | None = None
    env: dict[str, str] = field(default_factory=dict)


def resolve_nodes(spec: Spec) -> tuple[NodeSpec, ...]:
    """The nodes of a spec, in its order.

    Raises:
        SpecError: there is none, a name is unusable, or a name stands twice.
    """
    cluster = spec.cluster
    found: dict[str, tuple[NodeSpec, str]] = {}
    for node, place in _entries(spec):
        if not _SAFE.match(node.name):
            raise SpecError(
                f"{node.name!r} cannot be the name of a node",
                where=place,
                key=place,
                hint="a name begins with a letter or a digit and has no space, slash or control character",
            )
        if node.name in found:
            raise SpecError(
                f"node {node.name} stands twice: in {found[node.name][1]} and in {place}",
                where=place,
                key=place,
                hint="several workers on one node are `slots`",
            )
        found[node.name] = (node, place)
    if not found:
        raise SpecError(
            f"transport {cluster.transport} needs nodes, and the spec names none",
            key="cluster.nodes",
            hint='for example `nodes: ["gpu[01-04]"]`',
        )
    return tuple(node for node, _ in found.values())


def _entries(spec: Spec) -> Iterator[tuple[NodeSpec, str]]:
    """Every node with the place in the spec that names it."""
    cluster = spec.cluster
    if cluster.hostfile is not None:
        if cluster.nodes:
            raise SpecError("`cluster.nodes` and `cluster.hostfile` are both set", key="cluster.hostfile")
        path = spec.base_dir / cluster.hostfile.expanduser()
        for name, slots in hostfile.read(path):
            yield _node(cluster, NodeEntry(name=name, slots=slots), name), str(path)
        return
    nodes = cluster.nodes
    if isinstance(nodes, int) or not nodes:
        count = nodes if isinstance(nodes, int) else {"sandbox": 3, "local": 1}.get(cluster.transport, 0)
        if isinstance(nodes, int) and cluster.transport not in ("sandbox", "slurm"):
            raise SpecError(
                f"a number of nodes is for the sandbox; transport {cluster.transport} needs their names",
                key="cluster.nodes",
            )
        for index in range(count):
            name = "localhost" if cluster.transport == "local" else f"node{index + 1}"
            yield _node(cluster, NodeEntry(name=name), name), "cluster.nodes"
        return
    for index, item in enumerate(nodes):
        place = f"cluster.nodes[{index}]"
        entry = NodeEntry(name=item) if isinstance(item, str) else item
        names = nodeset.expand(entry.name)
        if len(names) > 1 and entry.address is not None:
            raise SpecError("one address cannot belong to a range of nodes", where=place, key=f"{place}.address")
        for name in names:
            yield _node(cluster, entry, name), place


def _node(cluster: Cluster, entry: NodeEntry, name: str) -> NodeSpec:
    local = cluster.transport == "local"
    here = sys.executable if cluster.transport in ("local", "sandbox") else None
    return NodeSpec(
        name=name,
        address=entry.address or ("127.0.0.1" if local else name),
        slots=entry.slots or cluster.slots,
        workdir=entry.workdir or cluster.workdir,
        user=entry.user or cluster.user,
        port=entry.port or cluster.port,
        python=entry.python or cluster.python or here,
        env=dict(entry.env),
    )
