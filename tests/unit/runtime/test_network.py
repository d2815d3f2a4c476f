from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from dtctl import names
from dtctl.nccl.profiles import NetworkProfile
from dtctl.runtime.distributed import network
from dtctl.runtime.distributed.worker import Worker
from tests.facts import missing


@pytest.fixture
def peer(worker: Worker) -> Worker:
    """One of 16 workers on two nodes with GPUs."""
    cuda = torch.device("cuda", 0)
    return dataclasses.replace(worker, world_size=16, local_world_size=8, backend="cpu:gloo,cuda:nccl", device=cuda)


ETHERNET = NetworkProfile(interface="eth3", nodes=2)
INFINIBAND = NetworkProfile(
    interface="eth3", nodes=2, rdma=[{"device": "mlx5_0", "state": "4: ACTIVE", "link_layer": "InfiniBand"}]
)


def names_of(worker: Worker, found: NetworkProfile, environ: dict[str, str]) -> dict[str, str]:
    return {setting.name: setting.value for setting in network.choose_network_variables(worker, found, environ)}


def test_a_worker_without_peers_needs_nothing(worker: Worker) -> None:
    assert network.choose_network_variables(worker, ETHERNET, {names.RUN_DIR: "/run"}) == []


def test_workers_of_one_machine_find_each_other(peer: Worker) -> None:
    alone = dataclasses.replace(peer, local_world_size=16)
    environ: dict[str, str] = {}
    network.set_network_variables(alone, environ)
    assert environ == {}


def test_on_cpus_gloo_alone_is_told_its_interface(peer: Worker) -> None:
    on_cpu = dataclasses.replace(peer, device=torch.device("cpu"), backend="gloo")
    assert names_of(on_cpu, INFINIBAND, {names.RUN_DIR: "/run"}) == {"GLOO_SOCKET_IFNAME": "eth3"}


def test_on_gpus_the_network_and_the_record_are_chosen(peer: Worker) -> None:
    assert names_of(peer, INFINIBAND, {names.RUN_DIR: "/run"}) == {
        "NCCL_SOCKET_IFNAME": "=eth3",
        "GLOO_SOCKET_IFNAME": "eth3",
        "NCCL_NET": "IB",
        "TORCH_FR_DUMP_TEMP_FILE": "/run/flight/nccl_trace_rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def test_what_is_set_stays_and_each_has_a_reason(peer: Worker) -> None:
    given = {"NCCL_SOCKET_IFNAME": "ib0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", names.RUN_DIR: "/run"}
    assert names_of(peer, ETHERNET, given).keys() == {"GLOO_SOCKET_IFNAME", "TORCH_FR_DUMP_TEMP_FILE"}
    assert all(
        len(setting.reason) > 20
        for setting in network.choose_network_variables(peer, INFINIBAND, {names.RUN_DIR: "/run"})
    )


def test_rank_0_says_what_was_set_and_why(
    peer: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "detect_network_profile", lambda _: ETHERNET)
    environ = {names.RUN_DIR: str(tmp_path)}
    network.set_network_variables(peer, environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "eth3"
    assert (tmp_path / "flight").is_dir()
    said = capsys.readouterr().out
    assert not missing(said, "GLOO_SOCKET_IFNAME=eth3 eth3")
    network.set_network_variables(dataclasses.replace(peer, rank=3), {})
    assert capsys.readouterr().out == ""


def test_no_rank_0_means_no_interface() -> None:
    assert network.detect_network_profile({}).interface == ""
    assert network.detect_network_profile({names.MASTER_ADDR: "127.0.0.1", names.MASTER_PORT: "1"}).interface == ""


def test_ports_of_rdma_devices_are_read(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("Ethernet\n")
    assert network.list_rdma_ports(tmp_path) == [
        {"device": "mlx5_0", "port": "1", "state": "4: ACTIVE", "link_layer": "Ethernet", "roce": "", "verbs": ""},
    ]
    assert network.list_rdma_ports(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("gid", "answer"),
    [("0000:0000:0000:0000:0000:ffff:0a00:0001", "yes"), ("fe80:0000:0000:0000:0222:48ff:fe12:3456", "no")],
)
def test_a_port_without_an_ipv4_address_cannot_do_roce(tmp_path: Path, gid: str, answer: str) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (port / "gids").mkdir()
    (port / "gid_attrs" / "types" / "0").write_text("RoCE v2\n")
    (port / "gids" / "0").write_text(gid + "\n")
    assert network.list_rdma_ports(tmp_path)[0]["roce"] == answer
