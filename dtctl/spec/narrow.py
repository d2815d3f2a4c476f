"""`dtctl launch --nodes` with a spec: the spec's cluster, reduced to some of its nodes."""

from __future__ import annotations

from dtctl import shell
from dtctl.errors import SpecError, suggest_node
from dtctl.spec import nodeset
from dtctl.spec.model import NodeEntry, Spec
from dtctl.spec.nodes import list_entries, resolve_nodes, resolve_spares

PLACE = "--nodes"


def narrow_nodes(spec: Spec, text: str) -> Spec:
    """Return the spec with only the named nodes and spares, in the order of the spec.

    Args:
        spec: the checked spec.
        text: names and ranges. A spare that is named becomes a node.

    Raises:
        SpecError: the names are not well formed, one is given twice, or the spec has no such node.
    """
    wanted = set(expand_given_nodes(text))
    if spec.cluster.transport == "slurm":
        settings = (f"cluster.nodes={len(wanted)}", f"slurm.nodelist={nodeset.fold_node_names(sorted(wanted))}")
        command = shell.join_command(word for setting in settings for word in ("--set", setting))
        raise SpecError("Slurm chooses the nodes", where=PLACE, hint=f"`{command}` asks for these nodes")
    spares = [spare.name for spare in resolve_spares(spec)]
    _check_known(wanted, [*(node.name for node in resolve_nodes(spec)), *spares])
    entries = [
        entry.model_copy(update={"name": written})
        for entry, written, _, _ in list_entries(spec)
        if written.rpartition("@")[2] in wanted
    ]
    entries += [NodeEntry.model_construct(name=name) for name in spares if name in wanted]
    cluster, network = spec.cluster, spec.network
    update: dict[str, object] = {"nodes": tuple(entries), "hostfile": None}
    if cluster.spares:
        update["spares"] = tuple(name for name in spares if name not in wanted)
    if cluster.min_nodes is not None:
        update["min_nodes"] = min(cluster.min_nodes, len(entries))
    if isinstance(network.interface, dict):
        interfaces = {name: interface for name, interface in network.interface.items() if name in wanted}
        network = network.model_copy(update={"interface": interfaces})
    return spec.model_copy(update={"cluster": cluster.model_copy(update=update), "network": network})


def expand_given_nodes(text: str) -> list[str]:
    """Return the names of the nodes that `--nodes` names, in its order.

    Raises:
        SpecError: the names are not well formed, or one is given twice.
    """
    try:
        names = nodeset.expand_nodeset(text)
    except SpecError as exc:
        raise SpecError(exc.message, where=PLACE, hint=exc.hint) from None
    if repeated := nodeset.find_repeated_name(names):
        raise SpecError(
            f"node {repeated} is given twice",
            where=PLACE,
            hint="name each node once; `--slots N` sets the number of workers on a node",
        )
    return names


def _check_known(wanted: set[str], known: list[str]) -> None:
    """Refuse names that the spec does not have."""
    for name in sorted(wanted - set(known)):
        hint = suggest_node(name, known, f"the nodes are {nodeset.fold_node_names(known)}")
        raise SpecError(f"the spec has no node {name}", where=PLACE, hint=hint)
