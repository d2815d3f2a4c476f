"""Nodes of `cluster.nodes`, with expanded ranges and defaults; duplicates are refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dtctl.errors import SpecError
from dtctl.printable import format_count
from dtctl.spec.model import NodeEntry, Spec

# A node's name becomes the name of a folder and of a script. Its name and its address become arguments of programs.
_NAME = re.compile(r"[^\W][^\s/\\\[\],]*\Z")
_ADDRESS = re.compile(r"[^\s-][^\s]*\Z")
_MAX_NAME_BYTES = 200
_SANDBOX_MAX = 250
"""Largest number of hosts of a sandbox, whose addresses belong to one /24 network."""
_DEFAULT_COUNT = {"sandbox": 3, "local": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """Node of a run, with all its settings from the spec."""

    name: str
    address: str
    """Host name, OpenSSH alias or numeric address to connect to."""
    slots: int | Literal["auto"]
    """Number of workers on this node; auto: one per GPU, 1 on a node without GPUs."""
    workdir: str
    """Folder on the node for everything that dtctl writes there."""
    user: str | None = None
    """Login user; None: the default of `ssh NODE`."""
    port: int | None = None
    """Port of the SSH server; None: the default of `ssh NODE`."""
    python: str | None = None
    """Python interpreter on the node; None: `python3` from the node's PATH."""
    job_python: str | None = None
    """Python interpreter of `job.environment`, which runs the program instead; None: the job has no environment."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the workers of this node alone."""
    rack: str | None = None
    """Name shared by nodes that may be lost together; None: not known."""
    gres: str | None = None
    """Generic resources of the node under Slurm."""


def resolve_nodes(spec: Spec) -> tuple[NodeSpec, ...]:
    """Return the nodes of a spec, in its order. The only file that is read is the hostfile, if the spec names one.

    Raises:
        SpecError: there is no node, or a name is unusable or listed twice.
    """
    by_name: dict[str, tuple[NodeSpec, str, str]] = {}
    for entry, written, key, where in list_entries(spec):
        node = _build_node_spec(spec, entry, written)
        _check_words(node, key, where)
        # Host names are case-insensitive, and so are the file systems of macOS.
        earlier = by_name.setdefault(node.name.casefold(), (node, key, where))
        if earlier[0] is not node:
            raise SpecError(
                f"node {node.name} is listed twice: in {_both_places(earlier[1:], (key, where))}",
                where=where,
                key=key,
                hint="give the number of workers on a node as `slots`",
            )
    nodes = tuple(node for node, _, _ in by_name.values())
    if not nodes:
        raise SpecError(
            f"transport {spec.cluster.transport} needs nodes, and the spec names none",
            where=spec.written_at("cluster"),
            key="cluster.nodes",
            hint='for example `nodes: ["gpu[01-04]"]`',
        )
    _check_others(spec, [node.name for node in nodes])
    return nodes


def resolve_spares(spec: Spec) -> tuple[NodeSpec, ...]:
    """Return the spare nodes, in the order in which they are used.

    Raises:
        SpecError: a name is unusable.
    """
    spares = []
    for index, text in enumerate(spec.cluster.spares):
        key = f"cluster.spares[{index}]"
        where = spec.written_at(key)
        for name in _expand_node_names(text, key, where):
            node = _build_node_spec(spec, _build_node_entry(name), name)
            _check_words(node, key, where)
            spares.append(node)
    return tuple(spares)


def _both_places(first: tuple[str, str], second: tuple[str, str]) -> str:
    places = [key if key == where else f"{key} ({where})" for key, where in (first, second)]
    return " and in ".join(places)


def list_entries(spec: Spec) -> Iterator[tuple[NodeEntry, str, str, str]]:
    """Yield for every node its entry, its name, and the key and the place of that name in the spec.

    Raises:
        SpecError: the spec has both a hostfile and nodes, or names are not well formed.
    """
    cluster = spec.cluster
    if cluster.hostfile is not None:
        if cluster.nodes:
            raise SpecError(
                "`cluster.nodes` and `cluster.hostfile` are both set",
                where=spec.written_at("cluster.hostfile"),
                key="cluster.hostfile",
                hint="keep one of the two",
            )
        from dtctl.spec import hostfile

        for line in hostfile.read_hostfile(cluster.hostfile):
            yield _build_node_entry(line.name, line.slots), line.name, "cluster.hostfile", line.where
        return
    if isinstance(cluster.nodes, int) or not cluster.nodes:
        for name in _numbered_names(spec):
            yield _build_node_entry(name), name, "cluster.nodes", spec.written_at("cluster.nodes")
        return
    for index, item in enumerate(cluster.nodes):
        key = f"cluster.nodes[{index}]"
        where = spec.written_at(key)
        entry = _build_node_entry(item) if isinstance(item, str) else item
        names = _expand_node_names(entry.name, key, where)
        if len(names) > 1 and entry.address is not None:
            raise SpecError("one address cannot belong to a range of nodes", where=where, key=f"{key}.address")
        for name in names:
            yield entry, name, key, where


def _numbered_names(spec: Spec) -> Iterable[str]:
    """Return names for the number of nodes in the spec or the transport's default; empty for other transports."""
    transport, nodes = spec.cluster.transport, spec.cluster.nodes
    if isinstance(nodes, int) and transport not in ("sandbox", "slurm"):
        raise SpecError(
            f"a number of nodes is for the sandbox; transport {transport} needs their names",
            where=spec.written_at("cluster.nodes"),
            key="cluster.nodes",
            hint="use `transport: sandbox` for virtual hosts on this machine",
        )
    if transport == "local":
        return ["localhost"]
    if transport == "sandbox" and isinstance(nodes, int) and nodes > _SANDBOX_MAX:
        raise SpecError(
            f"the sandbox has at most {_SANDBOX_MAX} hosts, and the spec wants {nodes}",
            where=spec.written_at("cluster.nodes"),
            key="cluster.nodes",
        )
    count = nodes if isinstance(nodes, int) else _DEFAULT_COUNT.get(transport, 0)
    return [f"node{index + 1}" for index in range(count)]


def _build_node_entry(name: str, slots: int | None = None) -> NodeEntry:
    # Names that are already checked need no validation, for which pydantic would build another validator first.
    return NodeEntry.model_construct(name=name, slots=slots)


def _expand_node_names(text: str, key: str, where: str) -> list[str]:
    from dtctl.spec import nodeset

    try:
        return nodeset.expand_nodeset(text)
    except SpecError as exc:
        raise SpecError(exc.message, where=where, key=key, hint=exc.hint) from None


def count_gres_gpus(text: str) -> int:
    """Return the number of GPUs in a request of generic resources: `gpu:8`, `gpu:a100:4,nic:1`; 0 without GPUs."""
    total = 0
    for item in text.split(","):
        kind, *rest = re.split(r"[:=]", item.strip().removeprefix("gres/"))
        if kind == "gpu":
            total += int(rest[-1]) if rest and rest[-1].isdigit() else 1
    return total


def join_gres(requests: Iterable[str | None]) -> str:
    """Return the generic resources of each node of a job: for each resource, the largest number that a node requests.

    Raises:
        ValueError: the nodes request different types of one resource, which a single node may not have.
    """
    wanted = list(dict.fromkeys(request for request in requests if request))
    if len(wanted) < 2:
        return "".join(wanted)
    counts: dict[str, int] = {}
    for item in (item for request in wanted for item in request.split(",")):
        *words, last = re.split(r"[:=]", item.strip().removeprefix("gres/"))
        name = ":".join(words if last.isdigit() else [*words, last])
        counts[name] = max(counts.get(name, 0), int(last) if last.isdigit() else 1)
    kinds = [name.partition(":")[0] for name in counts]
    if len({*kinds}) < len(kinds):
        raise ValueError(", ".join(wanted))
    return ",".join(f"{name}:{count}" for name, count in counts.items())


def _resolve_node_slots(spec: Spec, entry: NodeEntry, gres: str | None) -> int | Literal["auto"]:
    """Return the number of workers of a node; under Slurm `auto` is the number of GPUs that the job requests."""
    slots = entry.slots or spec.cluster.slots
    if slots != "auto" or spec.cluster.transport != "slurm":
        return slots
    extra = spec.slurm.extra if spec.slurm else {}
    return count_gres_gpus(gres or "") or count_gres_gpus(f"gpu:{extra.get('gpus-per-node', 0)}") or "auto"


def _build_node_spec(spec: Spec, entry: NodeEntry, name: str) -> NodeSpec:
    cluster = spec.cluster
    # As with ssh and rsync, `me@gpu1` also names the user.
    user, _, name = name.rpartition("@")
    local = cluster.transport == "local"
    interpreter = sys.executable if cluster.transport in ("local", "sandbox") else None
    slurm = spec.slurm if cluster.transport == "slurm" else None
    gres = entry.gres or (spec.slurm.gres if spec.slurm else None)
    container = slurm.container if slurm else None
    return NodeSpec(
        name=name,
        address=entry.address or ("127.0.0.1" if local else name),
        slots=_resolve_node_slots(spec, entry, gres),
        workdir=entry.workdir or cluster.workdir,
        user=user or entry.user or cluster.user,
        port=entry.port or cluster.port,
        python=container.python if container else entry.python or cluster.python or interpreter,
        env=dict(entry.env),
        rack=None if cluster.transport == "slurm" else entry.rack,
        gres=gres,
    )


def _check_words(node: NodeSpec, key: str, where: str) -> None:
    name = node.name
    if not (_NAME.match(name) and name.isprintable() and len(name.encode()) <= _MAX_NAME_BYTES):
        raise SpecError(
            f"{name[:_MAX_NAME_BYTES]!r} cannot be the name of a node",
            where=where,
            key=key,
            hint="a name begins with a letter or a digit and has no space, slash, bracket, comma or control character",
        )
    for word, value in (("address", node.address), ("user", node.user)):
        if value is not None and not (_ADDRESS.match(value) and value.isprintable()):
            raise SpecError(f"{value!r} cannot be the {word} of a node", where=where, key=f"{key}.{word}")


def _check_others(spec: Spec, names: list[str]) -> None:
    """Refuse settings for unknown nodes, unusable spares, and a `min_nodes` above the number of nodes."""
    cluster = spec.cluster
    interfaces = spec.network.interface
    for name in interfaces if isinstance(interfaces, dict) else ():
        if name not in names:
            from dtctl.spec import nodeset

            key = "network.interface"
            raise SpecError(
                f"network.interface names {name}, which is not a node of the spec",
                where=spec.written_at(key),
                key=key,
                hint=f"the nodes are {nodeset.fold_node_names(names)}",
            )
    _check_spares(spec, names)
    if cluster.min_nodes is not None and cluster.min_nodes > len(names):
        raise SpecError(
            f"cluster.min_nodes is {cluster.min_nodes}, and there are {format_count(len(names), 'node')}",
            where=spec.written_at("cluster.min_nodes"),
            key="cluster.min_nodes",
        )


def _check_spares(spec: Spec, names: list[str]) -> None:
    """Refuse spares that are nodes already, or that are listed twice."""
    if not spec.cluster.spares:
        return
    from dtctl.spec import nodeset

    nodes, spares = set(map(nodeset.normalize_host_name, names)), set[str]()
    for index, text in enumerate(spec.cluster.spares):
        key = f"cluster.spares[{index}]"
        where = spec.written_at(key)
        for name in _expand_node_names(text, key, where):
            host, plain = nodeset.normalize_host_name(name), name.rpartition("@")[2]
            if host in nodes:
                raise SpecError(f"node {plain} cannot be its own spare", where=where, key=key)
            if host in spares:
                raise SpecError(f"spare node {plain} is listed twice", where=where, key=key, hint="name it once")
            spares.add(host)
