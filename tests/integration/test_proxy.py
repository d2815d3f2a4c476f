"""Nodes that are reached through another machine only, as the user's OpenSSH configuration says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.hosts import Project, wait_until

PRINT = "import os; print('RAN', os.environ['DTCTL_NODE'], os.environ['MASTER_ADDR'], os.environ['RANK'], flush=True)\n"


@pytest.fixture
def cut(project: Project, sandbox: Sandbox) -> Sandbox:
    """node2 and node3 answer the other hosts and not this machine."""
    if sandbox.rootless:
        pytest.skip("a proxy command of the user cannot reach the hosts of a rootless sandbox")
    for node in ("node2", "node3"):
        done = project.run("sandbox", "fault", "drop", node, "--port", "22", "--from", "control")
        assert done.code == 0, done.err
    return sandbox


def write_config(project: Project, sandbox: Sandbox, known_hosts: Path, *hosts: str) -> Path:
    common = f"  User {sandbox.user}\n  IdentityFile {sandbox.identity_file}\n  UserKnownHostsFile {known_hosts}\n"
    addresses = "".join(f"Host {node.name}\n  HostName {node.address}\n" for node in sandbox.nodes)
    return project.write("ssh_config", "".join(hosts) + addresses + "Host *\n" + common)


def write_spec(project: Project, config: Path, *nodes: str) -> None:
    spec = {
        "cluster": {
            "transport": "ssh", "nodes": list(nodes), "slots": 1, "ssh_config": str(config), "python": sys.executable,
            "connect_timeout_s": 3,
        },
        "job": {"script": "train.py", "kind": "direct", "grace_s": 2},
    }  # fmt: skip
    project.write("dtctl.yaml", json.dumps(spec))
    project.write("train.py", PRINT)


def sessions_on(sandbox: Sandbox, name: str) -> int:
    from dtctl.sandbox import control

    lines = control.list_host_processes(sandbox.node(name)).values()
    return sum(line.startswith("sshd: ") and "@" in line for line in lines)


def test_a_job_runs_on_nodes_behind_a_jump_host(project: Project, cut: Sandbox) -> None:
    hosts = f"Host node2 {cut.nodes[2].address}\n  ProxyJump node1\nHost node3\n  ProxyJump {cut.nodes[0].address}:22\n"
    config = write_config(project, cut, cut.known_hosts, hosts)
    write_spec(project, config, "node2", "node3")
    done = project.run("launch", "--json")
    assert done.code == 0, done.err
    head = cut.node("node2").address
    assert sorted(line for line in done.err.splitlines() if "RAN" in line) == [
        f"[node2:0] RAN node2 {head} 0",
        f"[node3:1] RAN node3 {head} 1",
    ]
    assert done.done["left_behind"] == 0
    wait_until(lambda: sessions_on(cut, "node1") == 0, what="no connection to the jump host is left")


def test_two_jump_hosts_in_a_row(project: Project, cut: Sandbox) -> None:
    done = project.run("sandbox", "fault", "drop", "node3", "--port", "22", "--from", "node1")
    assert done.code == 0, done.err
    config = write_config(project, cut, cut.known_hosts, "Host node3\n  ProxyJump node1,node2\n")
    write_spec(project, config, "node3")
    done = project.run("launch")
    assert done.code == 0, done.err
    assert f"RAN node3 {cut.node('node3').address} 0" in done.out


def test_a_job_runs_on_nodes_behind_a_proxy_command(project: Project, cut: Sandbox) -> None:
    assert shutil.which("ssh")
    inner = project.write("inner_config", "")
    hosts = f"Host node2 node3\n  ProxyCommand ssh -F {inner} -W %h:%p node1\n"
    config = write_config(project, cut, cut.known_hosts, hosts)
    inner.write_text(config.read_text().replace(hosts, ""))
    write_spec(project, config, "node2", "node3")
    refused = project.run("launch")
    assert refused.code == 7, "the folder's own configuration runs a command here, and nobody has agreed to that"
    assert "ProxyCommand" in refused.err
    done = project.run("launch", "--json", "--yes")
    assert done.code == 0, done.err
    assert sorted(line.split()[2] for line in done.err.splitlines() if "RAN" in line) == ["node2", "node3"]
    assert done.done["left_behind"] == 0
    found = ["pgrep", "-f", str(inner)]
    wait_until(lambda: subprocess.run(found, capture_output=True, check=False).returncode == 1, what="proxies end")
    stopped = project.run("stop")
    assert (stopped.code, stopped.out) == (0, "0 processes left on 2 nodes\n"), stopped.err


def test_a_proxy_command_that_fails_is_a_connect_error(project: Project, cut: Sandbox) -> None:
    config = write_config(project, cut, cut.known_hosts, "Host node2\n  ProxyCommand no-such-program %h\n")
    write_spec(project, config, "node2")
    done = project.run("launch", "--yes")
    assert done.code == 6
    assert "node node2" in done.err
    assert "Traceback" not in done.err


def test_the_jump_host_has_to_show_a_known_key_too(project: Project, cut: Sandbox) -> None:
    lines = cut.known_hosts.read_text().splitlines(keepends=True)
    jump = cut.node("node1").address
    known = project.write("known_hosts", "".join(line for line in lines if jump not in line.split()[0].split(",")))
    config = write_config(project, cut, known, "Host node2\n  ProxyJump node1\n")
    write_spec(project, config, "node2")
    unknown = project.run("launch")
    assert unknown.code == 6
    assert "host key is unknown" in unknown.err
    assert not missing(unknown.err, "node2 jump host node1")
    assert "RAN" not in unknown.out

    other = next(line for line in lines if cut.node("node3").address in line.split()[0].split(","))
    known.write_text(known.read_text() + f"{jump} {other.split(None, 1)[1]}")
    changed = project.run("launch")
    assert changed.code == 6
    assert "host key has changed" in changed.err
    assert not missing(changed.err, "node2 jump host node1")


def test_a_jump_host_that_is_down_is_named(project: Project, cut: Sandbox) -> None:
    assert project.run("sandbox", "fault", "reject", "node1", "--port", "22", "--from", "control").code == 0
    config = write_config(project, cut, cut.known_hosts, "Host node2\n  ProxyJump node1\n")
    write_spec(project, config, "node2")
    done = project.run("launch")
    assert done.code == 6
    assert not missing(done.err, "jump host node1")
    assert "its SSH port refuses connections" in done.err


def test_the_node_behind_has_to_show_a_known_key(project: Project, cut: Sandbox) -> None:
    lines = cut.known_hosts.read_text().splitlines(keepends=True)
    address = cut.node("node2").address
    known = project.write("known_hosts", "".join(line for line in lines if address not in line.split()[0].split(",")))
    config = write_config(project, cut, known, "Host node2\n  ProxyJump node1\n")
    write_spec(project, config, "node2")
    done = project.run("launch")
    assert done.code == 6
    assert "host key is unknown" in done.err
    wait_until(lambda: sessions_on(cut, "node1") == 0, what="the connection to the jump host is let go of")
