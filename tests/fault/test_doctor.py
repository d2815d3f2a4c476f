"""The doctor against faults injected into real virtual hosts: what holds for all of them."""

from __future__ import annotations

import json
import secrets
import sys
from typing import Any

import pytest

from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.fault.examining import bad, examine, note, on

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_a_healthy_cluster_has_no_finding_run_after_run(sandbox: Sandbox, project: Any) -> None:
    for full in (True, False, False):
        code, said = examine(project, {"cluster.python": sys.executable}, full=full)
        assert (code, said["ok"], bad(said)) == (0, True, [])
        assert {"reach", "data-ports", "large-packets", "torch"} <= {one["check"] for one in said["findings"]}


def test_quick_on_a_healthy_cluster_has_no_finding_either(sandbox: Sandbox, project: Any) -> None:
    code, said = examine(project, None, "--quick")
    assert (code, bad(said)) == (0, [])
    assert said["not_examined"] == [
        "no node shows a GPU",
        "no node has an InfiniBand or RoCE port",
        "bandwidth, loss and delay between nodes were left out",
        "torch was not run",
        "the job's own code and data",
    ]
    skipped = {one["check"] for one in said["findings"] if one["status"] == "skip"}
    assert {"gpus", "rdma", "bandwidth", "collective"} <= skipped


READ_SETTINGS = "grep -rs . /proc/sys/net/ipv4 || true"


def test_nothing_is_left_on_the_nodes(sandbox: Sandbox, project: Any) -> None:
    workdir = f"~/{secrets.token_hex(4)}"
    before = on(sandbox, "node1", "find", str(sandbox.home))
    settings = on(sandbox, "node1", "sh", "-c", READ_SETTINGS)
    examine(project, {"cluster.workdir": workdir})
    assert on(sandbox, "node1", "find", str(sandbox.home)) == before
    assert on(sandbox, "node1", "sh", "-c", READ_SETTINGS) == settings
    listening = [line.split()[4] for line in on(sandbox, "node1", "ss", "-Hltun").splitlines() if "LISTEN" in line]
    assert {address.rpartition(":")[2] for address in listening} == {"22"}, "its ports are open only while it runs"


def test_two_faults_at_once_are_both_told(sandbox: Sandbox, project: Any) -> None:
    faults.block_ports(sandbox, sandbox.node("node2"), ports="32768:60999", source=None, reject=False)
    on(sandbox, "node3", "mount", "-t", "tmpfs", "-o", "size=1m", faults.DISK, "/dev/shm")
    note(sandbox)
    code, said = examine(project)
    assert code == 9
    assert {(one["check"], *one["nodes"]) for one in bad(said)} == {("shm", "node3"), ("data-ports", "node2")}
    assert sum(one["primary"] for one in said["findings"]) == 1


def test_people_see_the_pair_and_the_fix(sandbox: Sandbox, project: Any) -> None:
    faults.block_ports(sandbox, sandbox.node("node3"), ports="32768:60999", source=sandbox.node("node1"), reject=False)
    note(sandbox)
    examine(project)
    done = project.run("doctor")
    assert done.code == 9
    assert "DROP" in done.out
    assert "primary cause: data-ports" in done.out
    assert "fix: on node3: sudo iptables -D INPUT -s" in done.out, done.out
    assert "else on node3: let TCP" in done.out


def test_nccl_env_derives_the_interface_of_each_node_from_its_route(sandbox: Sandbox, project: Any) -> None:
    examine(project, {"job.env": {"NCCL_DEBUG": "WARN"}})
    done = project.run("nccl", "env", "--json")
    assert done.code == 0, done.err
    nodes = json.loads(done.out)["nodes"]
    assert [node["node"] for node in nodes] == ["node1", "node2", "node3"]
    for node in nodes:
        assert (node["profile"], node["unreached"]) == ("ethernet", [])
        assert {one["name"]: one["value"] for one in node["set"]} == {
            "NCCL_SOCKET_IFNAME": "=eth0",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        assert {"name": "NCCL_DEBUG", "value": "WARN", "origin": "the spec"} in node["now"]


def test_nccl_env_has_tried_whether_the_nodes_reach_each_other_that_way(sandbox: Sandbox, project: Any) -> None:
    examine(project, None, "--quick")
    faults.block_ports(sandbox, sandbox.node("node3"), ports="32768:60999", source=sandbox.node("node1"), reject=False)
    note(sandbox)
    nodes = json.loads(project.run("nccl", "env", "--json").out)["nodes"]
    assert [node["unreached"] for node in nodes] == [["node3"], [], ["node1"]], "answers to node3 are dropped too"
    assert "cannot reach node3" in project.run("nccl", "env").out


def test_a_launch_that_asks_the_doctor_starts_nothing_on_a_sick_cluster(sandbox: Sandbox, project: Any) -> None:
    faults.block_ports(sandbox, sandbox.node("node2"), ports="32768:60999", source=None, reject=False)
    note(sandbox)
    examine(project)
    done = project.run("launch", "--doctor")
    assert done.code == 9, done.err
    assert "nothing was started" in done.err
    assert not missing(done.err, "node2 TCP")
    assert not (project.folder / ".dtctl").exists()


def test_a_launch_that_asks_the_doctor_runs_on_a_healthy_cluster(sandbox: Sandbox, project: Any) -> None:
    examine(project)
    done = project.run("launch", "--doctor")
    assert done.code == 0, done.err
