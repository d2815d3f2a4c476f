"""`dtctl nccl explain`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.command_line import dtctl
from tests.facts import missing


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("NCCL_SOCKET_IFNAME", 0, "default: ib*"),
        ("nccl_timeout", 0, "use instead: init_process_group"),
        ("NCCL_SOCKET_IFNAM", 2, "did you mean NCCL_SOCKET_IFNAME?"),
    ],
)
def test_a_variable_is_explained(tmp_path: Path, name: str, code: int, said: str) -> None:
    done = explained(tmp_path, name)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def explained(tmp_path: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return dtctl("nccl", "explain", *names, cwd=tmp_path)


def test_variables_of_the_rendezvous_and_of_processes_are_explained_several_at_once(tmp_path: Path) -> None:
    names = (
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
    )
    done = explained(tmp_path, "master_addr,MASTER_PORT", *names[2:])
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")] == list(names)
    told = json.loads(explained(tmp_path, "--json", *names).stdout)
    assert [one["name"] for one in told["variables"]] == list(names)


def test_names_that_are_not_known_leave_the_others_explained(tmp_path: Path) -> None:
    done = explained(tmp_path, "RANK", "NCCL_SOCKET_IFNAM", "NCCL_FOO", "WORLD_SIZE")
    assert done.returncode == 2
    assert "RANK" in done.stdout
    assert "WORLD_SIZE" in done.stdout
    assert not missing(done.stderr, "NCCL_SOCKET_IFNAM NCCL_FOO")
    assert not missing(done.stderr, "NCCL_SOCKET_IFNAME")
    assert json.loads(explained(tmp_path, "--json", "RANK", "NCCL_FOO").stdout)["unknown"] == ["NCCL_FOO"]


def test_a_value_is_judged(tmp_path: Path) -> None:
    assert "about 1: 1 forces sockets" in explained(tmp_path, "NCCL_IB_DISABLE=1").stdout
    assert "about LOUD: NCCL_DEBUG has no value LOUD" in explained(tmp_path, "NCCL_DEBUG=LOUD").stdout
    assert "about" not in explained(tmp_path, "NCCL_DEBUG=INFO").stdout
