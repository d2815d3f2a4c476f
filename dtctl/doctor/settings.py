"""Variables of NCCL and gloo that each node needs, and those that it has now."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dtctl.doctor.checks.environment import effective
from dtctl.doctor.checks.used import why_not
from dtctl.doctor.examine import given_to, locator, names_of, wanted_of
from dtctl.doctor.node_report import NodeReport, good_ways
from dtctl.doctor.observe import observe
from dtctl.doctor.used import UsedInterface, named_interfaces
from dtctl.errors import DtctlError
from dtctl.launch.cluster import ResolvedCluster
from dtctl.nccl import profiles
from dtctl.spec.model import Spec
from dtctl.transport.fanout import raise_failures


def node_settings(spec: Spec, cluster: ResolvedCluster) -> list[dict[str, Any]]:
    """Return a row a node: `node`, `profile`, `set` (name, value, reason), `now` (name, value, origin), `unusable`, ...

    `unusable` is why workers will not meet by the interface that the spec names; `unreached` are the nodes that it
    cannot call: what is to be set is tried, not only derived.

    Raises:
        DtctlError: a node cannot be asked.
    """
    wanted = [wanted_of(spec, spec_node, cluster) for spec_node in cluster.nodes]
    jobs = {spec_node.name: given_to(spec, spec_node) for spec_node in cluster.nodes}
    reports = observe(
        wanted,
        cluster.make_transport(),
        rendezvous=(),
        data_ports=1,
        names=names_of(spec, cluster),
        locate=locator(spec, jobs),
        progress=lambda _: None,
    )
    failures: dict[str, DtctlError] = {node.name: node.error for node in reports if node.error is not None}
    raise_failures(failures)
    used = {node.name: named_interfaces(node, spec, jobs[node.name]) for node in reports}
    return [_of(node, reports, spec, jobs[node.name], used) for node in reports]


def _of(
    node: NodeReport,
    reports: list[NodeReport],
    spec: Spec,
    job: dict[str, str],
    used: dict[str, list[UsedInterface]],
) -> dict[str, Any]:
    ways = [way for other in reports if other is not node and (way := node.facts["ways"].get(other.address))]
    chosen = spec.network.interface
    named = chosen.get(node.name) if isinstance(chosen, dict) else None if chosen == "auto" else chosen
    network = profiles.NetworkProfile(
        interface=named or (ways[0] if ways else ""),
        named=named is not None,
        rdma=node.facts["rdma"],
        nodes=len(reports),
    )
    profile = profiles.detect(network) if spec.network.profile == "auto" else spec.network.profile
    good = good_ways([node])
    return {
        "node": node.name,
        "unusable": next(
            (why for interface in used[node.name] if (why := why_not(node, interface, reports, used))), ""
        ),
        "unreached": [other.name for other in reports if other is not node and (node.name, other.name) not in good],
        "profile": profile,
        "set": [asdict(setting) for setting in profiles.settings(profile, network)],
        "now": [
            {"name": name, "value": value, "origin": origin} for name, (value, origin) in effective(node, job).items()
        ],
    }
