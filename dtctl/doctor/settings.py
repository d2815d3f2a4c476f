"""Variables of NCCL and gloo that each node needs, and those that are set now."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dtctl.doctor.checks.address_checks import explain_unusable_interface
from dtctl.doctor.checks.environment import resolve_worker_variables
from dtctl.doctor.examine import build_node_query, collect_spec_variables, list_host_names, make_address_locator
from dtctl.doctor.node_probes import observe_nodes
from dtctl.doctor.node_report import NodeReport, find_good_ways
from dtctl.doctor.planned_addresses import UsedInterface, find_named_interfaces
from dtctl.errors import DtctlError
from dtctl.launch.cluster import ResolvedCluster
from dtctl.nccl import profiles
from dtctl.spec.model import Spec
from dtctl.transport.fanout import raise_failures


def list_node_settings(spec: Spec, cluster: ResolvedCluster) -> list[dict[str, Any]]:
    """Return a row per node: `node`, `profile`, `set` (name, value, reason), `now` (name, value, origin), ...

    `unusable` is the reason why workers cannot connect through the interface that the spec names; `unreached` are the
    nodes that this node cannot call: the settings are tested, not only derived.

    Raises:
        DtctlError: a node cannot be examined.
    """
    wanted = [build_node_query(spec, spec_node, cluster) for spec_node in cluster.nodes]
    jobs = {spec_node.name: collect_spec_variables(spec, spec_node) for spec_node in cluster.nodes}
    reports = observe_nodes(
        wanted,
        cluster.make_transport(),
        rendezvous=(),
        data_ports=1,
        names=list_host_names(spec, cluster),
        locate=make_address_locator(spec, jobs),
        progress=lambda _: None,
    )
    failures: dict[str, DtctlError] = {node.name: node.error for node in reports if node.error is not None}
    raise_failures(failures)
    used = {node.name: find_named_interfaces(node, spec, jobs[node.name]) for node in reports}
    return [_build_node_settings(node, reports, spec, jobs[node.name], used) for node in reports]


def _build_node_settings(
    node: NodeReport,
    reports: list[NodeReport],
    spec: Spec,
    job: dict[str, str],
    used: dict[str, list[UsedInterface]],
) -> dict[str, Any]:
    ways = [way for other in reports if other is not node and (way := node.facts["ways"].get(other.address))]
    chosen = spec.network.interface
    named = None if chosen == "auto" else chosen
    if isinstance(named, dict):
        named = named.get(node.name)
    network = profiles.NetworkProfile(
        interface=named or (ways[0] if ways else ""),
        named=named is not None,
        rdma=node.facts["rdma"],
        nodes=len(reports),
    )
    profile = profiles.find_matching_profile(network) if spec.network.profile == "auto" else spec.network.profile
    good = find_good_ways([node])
    return {
        "node": node.name,
        "unusable": next(
            (
                why
                for interface in used[node.name]
                if (why := explain_unusable_interface(node, interface, reports, used))
            ),
            "",
        ),
        "unreached": [other.name for other in reports if other is not node and (node.name, other.name) not in good],
        "profile": profile,
        "set": [asdict(setting) for setting in profiles.list_profile_variables(profile, network)],
        "now": [
            {"name": name, "value": value, "origin": origin}
            for name, (value, origin) in resolve_worker_variables(node, job).items()
        ],
    }
