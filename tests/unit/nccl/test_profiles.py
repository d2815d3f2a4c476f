"""Profiles: as few variables as possible, each with a reason, all of them known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dtctl.nccl.catalogue import load_variable_catalogue
from dtctl.nccl.profiles import NetworkProfile, find_matching_profile, list_profile_variables


def port(device: str, state: str = "4: ACTIVE", layer: str = "InfiniBand") -> dict[str, str]:
    return {"device": device, "port": "1", "state": state, "link_layer": layer}


@pytest.mark.parametrize(
    ("network", "profile"),
    [
        (NetworkProfile(interface="eth0", nodes=1), "nvlink"),
        (NetworkProfile(interface="eth0", nodes=2), "ethernet"),
        (NetworkProfile(interface="eth0", nodes=2, rdma=[port("mlx5_0")]), "infiniband"),
        (NetworkProfile(interface="eth0", nodes=2, rdma=[port("mlx5_0", layer="Ethernet")]), "roce"),
        (NetworkProfile(interface="eth0", nodes=2, rdma=[port("rdmap79s0", layer="Unspecified")]), "efa"),
        (NetworkProfile(interface="eth0", nodes=2, rdma=[port("mlx5_0", "1: DOWN")]), "ethernet"),
    ],
)
def test_the_profile_is_seen_from_the_devices(network: NetworkProfile, profile: str) -> None:
    assert find_matching_profile(network) == profile


def test_one_node_needs_nothing() -> None:
    assert list_profile_variables("nvlink", NetworkProfile(interface="eth0", nodes=1)) == []


def test_infiniband_leaves_out_dead_devices_and_refuses_to_fall_back() -> None:
    network = NetworkProfile(interface="ib0", nodes=2, rdma=[port("mlx5_0"), port("mlx5_1", "1: DOWN")])
    found = {one.name: one.value for one in list_profile_variables("infiniband", network)}
    assert found == {
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_NET": "IB",
        "NCCL_IB_HCA": "=mlx5_0",
    }


def nccl_uses(value: str, devices: Sequence[str]) -> list[str]:
    """The devices that NCCL takes: parseStringList and ncclNetIbInit of src/transport/net_ib.cc, without ports."""
    exact = value.startswith("=")
    names = value[1 if exact else 0 :].split(",")
    return [one for one in devices if any(one == name if exact else one.startswith(name) for name in names)]


@pytest.mark.parametrize("down", [1, 7])
def test_nccl_finds_every_device_that_is_named(down: int) -> None:
    names = [f"mlx5_{index}" for index in range(12)]
    ports = [port(name, "1: DOWN" if index == down else "4: ACTIVE") for index, name in enumerate(names)]
    found = {
        one.name: one.value
        for one in list_profile_variables("infiniband", NetworkProfile(interface="", nodes=2, rdma=ports))
    }
    assert nccl_uses(found["NCCL_IB_HCA"], names) == [name for name in names if name != names[down]]


def test_an_ethernet_card_beside_infiniband_is_left_out() -> None:
    ports = [port("mlx5_0"), port("mlx5_1"), port("mlx5_2", layer="Ethernet")]
    network = NetworkProfile(interface="", nodes=2, rdma=ports)
    assert find_matching_profile(network) == "infiniband"
    found = {one.name: one.value for one in list_profile_variables("infiniband", network)}
    assert found["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1"


def test_an_ethernet_port_that_has_no_address_for_roce_is_ethernet() -> None:
    lone = {**port("mlx5_0", layer="Ethernet"), "roce": "no"}
    assert find_matching_profile(NetworkProfile(interface="eth0", nodes=2, rdma=[lone])) == "ethernet"


def test_devices_that_were_not_handed_into_the_container_are_not_asked_of_nccl() -> None:
    closed = {**port("mlx5_0"), "verbs": "no"}
    assert find_matching_profile(NetworkProfile(interface="eth0", nodes=2, rdma=[closed])) == "ethernet", (
        "a slow job, not a failed one"
    )
    network = NetworkProfile(interface="eth0", nodes=2, rdma=[closed, {**port("mlx5_1"), "verbs": "yes"}])
    assert {one.name: one.value for one in list_profile_variables(find_matching_profile(network), network)}[
        "NCCL_IB_HCA"
    ] == "=mlx5_1"


@pytest.mark.parametrize("profile", ["ethernet", "roce", "infiniband", "efa", "azure", "gcp-tcpxo"])
def test_every_setting_has_a_reason_and_nothing_is_forced(profile: str) -> None:
    for one in list_profile_variables(profile, NetworkProfile(interface="eth0", nodes=2, rdma=[port("mlx5_0")])):
        assert one.reason
        assert one.name not in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE")
        assert not one.name.startswith("NCCL_") or load_variable_catalogue()[one.name].kind == "live"
