"""Variables, configuration files, and what Slurm says."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from dtctl.sandbox.layout import Sandbox
from tests.fault.examining import examine, expect, on

pytestmark = pytest.mark.integration


def test_a_variable_is_set_on_one_node_only(sandbox: Sandbox, project: Any) -> None:
    nodes = ["node1", {"name": "node2", "env": {"NCCL_BUFFSIZE": "8388608"}}, "node3"]
    expect(examine(project, {"cluster.nodes": nodes}), "env-differs", ["node2"], said="NCCL_BUFFSIZE")


def test_a_configuration_file_of_nccl_differs(sandbox: Sandbox, project: Any) -> None:
    conf = sandbox.home / ".nccl.conf"
    on(sandbox, "node3", "sh", "-c", f"echo NCCL_CROSS_NIC=0 > {conf}")
    try:
        expect(examine(project), "env-differs", ["node3"], said=".nccl.conf")
    finally:
        on(sandbox, "node3", "rm", str(conf))


@pytest.mark.parametrize(
    ("name", "value", "check", "said"),
    [
        ("NCCL_SOCKET_IFNAM", "eth0", "env-unknown", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DEBUG", "DEBUG", "env-unknown", "WARN"),
        ("NCCL_TIMEOUT", "1800", "env-dead", "timeout"),
        ("NCCL_TREE_THRESHOLD", "0", "env-dead", "removed"),
        ("NCCL_ALGO", "Ring", "env-dangerous", "2.24"),
        ("NCCL_IB_DISABLE", "1", "env-dangerous", "unset"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "env-dangerous", "hang"),
    ],
)
def test_variables_that_do_nothing_good(
    sandbox: Sandbox, project: Any, name: str, value: str, check: str, said: str
) -> None:
    result = examine(project, {"job.env": {name: value}})
    expect(result, check, ["node1", "node2", "node3"], status="warn", said=said)


def test_an_interface_that_a_node_does_not_have(sandbox: Sandbox, project: Any) -> None:
    nodes = ["node1", "node2", {"name": "node3", "env": {"GLOO_SOCKET_IFNAME": "ib7"}}]
    expect(examine(project, {"cluster.nodes": nodes}), "interface", ["node3"], said="ib7")


def test_slurm_says_that_the_time_is_over(sandbox: Sandbox, project: Any) -> None:
    examine(project, None, "--quick")
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 300), "SLURM_JOB_NUM_NODES": "3"}
    done = project.run("doctor", "--json", "--quick", env=inside)
    expect((done.code, json.loads(done.out)), "time-left", ["node1"], status="warn", said="sbatch --time")
