"""Variables that a network needs, with their reasons. Pure; as few as possible, since every value replaces a default.

Sources: NVIDIA's NCCL environment guide; the EFA cheat sheet of AWS; azurehpc-health-checks; NVIDIA's appendix for GCP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableSetting:
    """A variable to set on a node."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProfile:
    """Facts about a node's network."""

    interface: str
    """Interface that packets to the other nodes leave by; empty when there is none or no other node."""
    named: bool = False
    """True if the spec names that interface (`network.interface`); packets may use another interface by default."""
    rdma: Sequence[Mapping[str, str]] = ()
    """Ports of RDMA devices: device, port, state, link_layer; `verbs` is no where the job may not open the device."""
    nodes: int = 1


def find_matching_profile(network: NetworkProfile) -> str:
    """Return the profile that fits the facts; among clouds, only AWS can be recognized on its nodes."""
    if network.nodes == 1:
        return "nvlink"
    active = _list_usable_ports(network)
    if any(port["device"].startswith(("efa", "rdmap")) for port in active):
        return "efa"
    if any(port["link_layer"] == "InfiniBand" for port in active):
        return "infiniband"
    return "roce" if any(_is_port_routable(port) for port in active) else "ethernet"


def _list_usable_ports(network: NetworkProfile) -> list[Mapping[str, str]]:
    """Return ports with a link whose device a job can open; in a container the kernel also lists other devices."""
    return [port for port in network.rdma if "ACTIVE" in port["state"] and port.get("verbs") != "no"]


def _is_port_routable(port: Mapping[str, str]) -> bool:
    """Return whether a port can do RoCE between nodes by its table of addresses: RoCE v2 needs one with IPv4.

    The virtual function behind Azure's accelerated networking is an active port without one.
    """
    return port.get("roce", "") != "no"


def list_profile_variables(profile: str, network: NetworkProfile) -> list[VariableSetting]:
    """Return the variables for a profile (one of `network.profile`, not auto) on a node."""
    if network.nodes == 1 or profile == "nvlink":
        return []  # NCCL needs no settings for the GPUs of one machine
    result = []
    if network.interface:
        route = f"{network.interface} is the interface of the route to the other nodes"
        reason = f"network.interface names {network.interface}" if network.named else route
        result = [
            VariableSetting(
                name="NCCL_SOCKET_IFNAME", value=f"={network.interface}", reason=f"{reason}; = means exactly this one"
            ),
            VariableSetting(
                name="GLOO_SOCKET_IFNAME",
                value=network.interface,
                reason=f"{reason}; otherwise gloo resolves the host name",
            ),
        ]
    return result + _PROFILES[profile](network)


def _list_ethernet_variables(network: NetworkProfile) -> list[VariableSetting]:
    if not network.rdma:
        return []
    return [
        VariableSetting(
            name="NCCL_NET", value="Socket", reason="the node has RDMA devices, but the profile does not use them"
        )
    ]


def _list_rdma_variables(network: NetworkProfile) -> list[VariableSetting]:
    variables = [
        VariableSetting(
            name="NCCL_NET", value="IB", reason="an error instead of a silent, ten times slower fall-back to TCP"
        )
    ]
    devices = dict.fromkeys(port["device"] for port in network.rdma)
    active = _list_usable_ports(network)
    if any(port["link_layer"] == "InfiniBand" for port in active):
        # In such a cluster, Ethernet is for storage.
        active = [port for port in active if port["link_layer"] == "InfiniBand"]
    used = dict.fromkeys(port["device"] for port in active)
    if used and len(used) < len(devices):
        # NCCL removes one `=` and compares the rest by name, so a second `=` would invalidate the first name.
        why = "leaves out devices without a link, and Ethernet beside InfiniBand; = means exactly these"
        variables.append(VariableSetting(name="NCCL_IB_HCA", value="=" + ",".join(used), reason=why))
    return variables


def _list_efa_variables(_: NetworkProfile) -> list[VariableSetting]:
    # FI_PROVIDER, NCCL_PROTO and FI_EFA_USE_DEVICE_RDMA are not set: aws-ofi-nccl 1.7 and newer chooses better values.
    return [
        VariableSetting(name="NCCL_NET", value="AWS Libfabric", reason="an error instead of a silent fall-back to TCP")
    ]


def _list_azure_variables(network: NetworkProfile) -> list[VariableSetting]:
    relaxed = "virtual machines need relaxed ordering for full bandwidth"
    return [
        *_list_rdma_variables(network),
        VariableSetting(name="NCCL_IB_PCI_RELAXED_ORDERING", value="1", reason=relaxed),
        VariableSetting(name="UCX_IB_PCI_RELAXED_ORDERING", value="on", reason=relaxed),
        VariableSetting(name="CUDA_DEVICE_ORDER", value="PCI_BUS_ID", reason="GPUs in the order of the topology file"),
    ]


def _gcp_tcpxo(_: NetworkProfile) -> list[VariableSetting]:
    # The plug-in includes a script with two dozen values that change with its version, so copies of it become outdated.
    return []


_PROFILES = {
    "ethernet": _list_ethernet_variables,
    "roce": _list_rdma_variables,
    "infiniband": _list_rdma_variables,
    "efa": _list_efa_variables,
    "azure": _list_azure_variables,
    "gcp-tcpxo": _gcp_tcpxo,
}
NOTES = {
    "gcp-tcpxo": "source the plug-in's own nccl-env-profile.sh in job.setup; its values change with its version",
    "roce": "the traffic class (NCCL_IB_TC) depends on the site: ask its administrator; leave NCCL_IB_GID_INDEX unset; "
    "on GCP's A3 Ultra and A4 source the script of the gIB plug-in in job.setup, which sets NCCL_NET itself",
    "azure": "set NCCL_TOPO_FILE to the file of your machine size in /opt/microsoft",
}
"""Return notes about needs of a profile that depend on facts that are not known here."""
