"""Facts about this machine, compared with what the system says."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from dtctl import node_facts


def test_the_first_port_that_is_free_is_chosen_and_left_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("0.0.0.0", 0)) as two:
        taken = [one.getsockname()[1], two.getsockname()[1]]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        assert node_facts.find_free_port([*taken, free]) == free
        assert node_facts.find_free_port([free]) == free, "it is not held"
        assert node_facts.find_free_port(taken) == 0
    assert node_facts.find_free_port([]) == 0


def test_a_port_that_a_client_has_just_left_counts_as_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        peer, _ = server.accept()
        peer.close()  # this end waits in TIME_WAIT
        client.close()
    assert node_facts.find_free_port([port]) == port


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_socket_shows_while_it_listens_and_after_a_connection(family: socket.AddressFamily) -> None:
    address = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        assert node_facts.has_socket_at(port)
        client = socket.create_connection((address, port))
        peer, _ = server.accept()
        peer.close()
        client.close()
    assert node_facts.has_socket_at(port), "the end of a connection shows for a minute"
    with socket.create_server((address, 0), family=family) as server:
        unused = server.getsockname()[1]
    assert not node_facts.has_socket_at(unused)


def test_the_interface_towards_an_address() -> None:
    assert node_facts.find_interface_towards("127.0.0.1") == "lo"
    assert node_facts.find_interface_towards("not-a-number.invalid") == ""
    table = Path("/proc/net/if_inet6")
    if table.exists() and " lo\n" in table.read_text():
        assert node_facts.find_interface_towards("::1") == "lo"


def test_an_interface_is_found_by_its_address() -> None:
    assert node_facts.find_interface_of("127.0.0.1") == "lo"
    assert node_facts.find_interface_of("") == ""
    assert node_facts.find_interface_of("192.0.2.255") == ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 1))  # reserved for documentation: any way out will do
        except OSError:
            pytest.skip("this machine has no way out")
        own = probe.getsockname()[0]
    assert node_facts.find_interface_of(own) in {name for _, name in socket.if_nameindex()} - {"lo"}


def test_an_address_and_its_interface_are_each_other_s() -> None:
    assert node_facts.read_interface_ipv4("lo") == "127.0.0.1"
    assert node_facts.read_interface_ipv4("no-such-interface") == ""
    assert node_facts.find_address_towards("127.0.0.1") == "127.0.0.1"


def test_a_process_is_told_from_its_remains_and_from_none() -> None:
    state, parent, start = node_facts.read_process_stat(os.getpid()) or ("", 0, 0)
    assert (state, parent) == ("R", os.getppid())
    assert node_facts.start_ticks(os.getpid()) == start > 0
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not waited for
    assert node_facts.read_process_state(child.pid) == "Z"
    assert node_facts.start_ticks(child.pid) == 0
    child.wait()
    assert node_facts.read_process_stat(child.pid) is None
    assert node_facts.start_ticks(child.pid) == 0


def test_a_command_with_parentheses_and_spaces_in_its_name_is_read(tmp_path: Path) -> None:
    odd = tmp_path / ") R 1 (x"
    odd.write_text("#!/bin/sh\nread line\n")
    odd.chmod(0o700)
    child = subprocess.Popen([odd], stdin=subprocess.PIPE)
    try:
        found = node_facts.read_process_stat(child.pid)
        assert found is not None
        assert found[1] == os.getpid()
    finally:
        child.communicate()


def test_ports_depend_on_the_seed_alone_and_lie_below_those_that_the_kernel_gives_out() -> None:
    ports = node_facts.compute_port_candidates("run/0")
    assert ports == node_facts.compute_port_candidates("run/0") != node_facts.compute_port_candidates("run/1")
    assert len(set(ports)) == node_facts.PORT_CANDIDATES
    assert all(node_facts.FIRST_PORT <= port <= node_facts.LAST_PORT for port in ports)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 8),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "MIG-7e3b"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "3,-1,2"}, 1),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
    ],
)
def test_gpus_are_those_that_a_worker_is_shown(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], count: int
) -> None:
    monkeypatch.setattr(node_facts, "list_nvidia_devices", lambda: [f"nvidia{index}" for index in range(8)])
    monkeypatch.setattr(node_facts, "_list_folder", lambda _: [])
    assert node_facts.count_gpus(environ) == count


def test_gpus_that_cannot_be_opened_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a job of Slurm, whose control group forbids the GPUs of others."""
    dev = ["nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"]
    monkeypatch.setattr(node_facts, "_list_folder", lambda folder: dev if folder == "/dev" else [])
    monkeypatch.setattr(node_facts, "_can_open_device", lambda path: path in ("/dev/nvidia2", "/dev/nvidia10"))
    assert node_facts.list_nvidia_devices() == ["nvidia2", "nvidia10"]
    assert node_facts.count_gpus({}) == 2


def test_gpus_in_parts_and_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = "/proc/driver/nvidia/capabilities"
    folders = {
        "/dev": ["nvidia0", "nvidia1"], capabilities: ["gpu0", "gpu1", "mig"], f"{capabilities}/gpu0/mig": ["gi7"],
    }  # fmt: skip
    monkeypatch.setattr(node_facts, "_list_folder", lambda folder: folders.get(folder, []))
    monkeypatch.setattr(node_facts, "_can_open_device", lambda _: True)
    assert node_facts.count_gpus({}) == 1, "CUDA shows a process one instance"
    folders.clear()
    folders["/dev/dri"] = ["card0", "renderD128", "renderD129"]
    vendors = {"renderD128": "0x1002\n", "renderD129": "0x1a03\n"}
    monkeypatch.setattr(node_facts, "read_system_file", lambda path: vendors.get(path.split("/")[4], ""))
    assert node_facts.count_gpus({}) == 1


@pytest.mark.parametrize(
    ("files", "opens", "said"), [([], True, ""), (["uverbs3"], True, "yes"), (["uverbs3"], False, "no")]
)
def test_rdma_devices_that_a_process_may_open(
    monkeypatch: pytest.MonkeyPatch, files: list[str], opens: bool, said: str
) -> None:
    asked = []
    monkeypatch.setattr(
        node_facts, "_list_folder", lambda folder: files if folder.endswith("mlx5_0/device/infiniband_verbs") else []
    )
    monkeypatch.setattr(node_facts, "_can_open_device", lambda path: asked.append(path) or opens)
    assert node_facts.check_rdma_access("mlx5_0") == said
    assert asked == ["/dev/infiniband/uverbs3"] * len(files)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"self/cgroup": "0::/\n", "cpu.max": "max 100000\n"}, 64),
        ({"self/cgroup": "0::/\n", "cpu.max": "200000 100000\n"}, 2),
        ({"self/cgroup": "0::/\n", "cpu.max": "50000 100000\n"}, 1),
        (
            {
                "self/cgroup": "0::/a/b\n",
                "cpu.max": "400000 100000\n",
                "a/cpu.max": "800000 100000\n",
                "a/b/cpu.max": "",
            },
            4,
        ),
        ({"self/cgroup": "0::/../../elsewhere\n", "cpu.max": "300000 100000\n"}, 3),
        (
            {
                "self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/docker/x\n",
                "cpu/docker/x/cpu.cfs_quota_us": "150000\n",
                "cpu/docker/x/cpu.cfs_period_us": "50000\n",
            },
            3,
        ),
        ({"self/cgroup": "1:cpu:/\n", "cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({f"cpu{number}": f"{number % 32},{number % 32 + 32}\n" for number in range(64)}, 32),
    ],
)
def test_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int) -> None:
    places = {
        f"/sys/devices/system/cpu/{name}/topology/thread_siblings_list"
        if name[3:].isdigit()
        else f"/proc/{name}"
        if name.startswith("self")
        else f"/sys/fs/cgroup/{name}": text
        for name, text in files.items()
    }
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(node_facts, "read_system_file", lambda path: places.get(path, ""))
    assert node_facts.count_usable_cores() == cores
