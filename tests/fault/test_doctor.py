"""The doctor against faults injected into real virtual hosts: right check, right node, primary, and a fix."""

from __future__ import annotations

import errno
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox

pytestmark = pytest.mark.integration

SPEC = {
    "cluster": {"transport": "sandbox", "nodes": ["node1", "node2", "node3"], "slots": 1, "connect_timeout_s": 3.0},
    "job": {"name": "t", "script": "train.py", "kind": "direct"},
}


def examine(
    project: Any, changes: dict[str, Any] | None = None, *options: str, full: bool = False
) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `dtctl doctor` with a spec; torch takes seconds to load, so only `full` ones load it."""
    spec: dict[str, Any] = json.loads(json.dumps(SPEC))
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    project.write("dtctl.yaml", json.dumps(spec))
    project.write("train.py", "print(1)\n")
    done = project.run("doctor", "--json", *options, *(() if full else ("--skip", "collective")), timeout_s=120)
    assert done.out, done.err
    return done.code, json.loads(done.out)


def bad(said: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in said["findings"] if one["status"] in ("fail", "warn")]


def expect(
    result: tuple[int, dict[str, Any]],
    check: str,
    nodes: Sequence[str],
    *,
    peers: Sequence[str] | None = None,
    status: str = "fail",
    said: str = "",
) -> None:
    """The primary finding is this one, nothing else is wrong that does not follow from it, and there is a fix."""
    code, answer = result
    found = bad(answer)
    told = json.dumps(found, indent=1)
    assert found, "nothing was found"
    first = found[0]
    assert (first["check"], first["status"], first["primary"]) == (check, status, True), told
    assert sorted(first["nodes"]) == sorted(nodes), told
    if peers is not None:
        assert sorted(first["peers"]) == sorted(peers), told
    assert said in first["summary"] + first["fix"] + " ".join(first["evidence"]), told
    assert first["fix"]
    assert first["evidence"]
    assert [one["check"] for one in found[1:] if not one["follows"]] == [], told
    # What follows from a warning can be a failure: how slow a link that loses 2% gets is chance.
    failed = any(one["status"] == "fail" for one in found)
    assert (code, answer["ok"]) == ((9, False) if failed else (0, True)), told


def on(sandbox: Sandbox, node: str, *argv: str, root: bool = True) -> str:
    """Run something on a host with all rights there."""
    host = sandbox.node(node)
    prefix = faults._administrator(sandbox, host) if root else control.enter_argv(sandbox, host, [])
    return subprocess.run([*prefix, *argv], check=True, capture_output=True, text=True).stdout


def placed(sandbox: Sandbox, node: str, name: str, text: str) -> str:
    """Path of a new file on a host, written there: the host's /tmp is not the one in which this test's files lie."""
    path = f"/tmp/{secrets.token_hex(4)}/{name}"
    write = 'mkdir -p "${1%/*}" && chmod 755 "${1%/*}" && printf %s "$2" >"$1" && chmod 755 "$1"'
    on(sandbox, node, "sh", "-c", write, "sh", path, text, root=False)
    return path


def note(sandbox: Sandbox) -> None:
    """Have the sandbox healed when the test is over."""
    faults.record(sandbox, [*faults.recorded(sandbox), "by a test"])


def test_a_healthy_cluster_has_no_finding_run_after_run(sandbox: Sandbox, project: Any) -> None:
    for _ in range(3):
        code, said = examine(project, {"cluster.python": sys.executable}, full=True)
        assert (code, said["ok"], bad(said)) == (0, True, [])
        assert {"reach", "data-ports", "large-packets", "torch"} <= {one["check"] for one in said["findings"]}


def test_quick_on_a_healthy_cluster_has_no_finding_either(sandbox: Sandbox, project: Any) -> None:
    code, said = examine(project, None, "--quick")
    assert (code, bad(said)) == (0, [])


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


PORTS: list[tuple[str, Callable[[Sandbox], object], str, list[str], list[str]]] = [
    (
        "all random ports dropped on one node",
        lambda s: faults.block(s, s.node("node2"), ports="32768:60999", source=None, reject=False),
        "dropped",
        ["node2"],
        ["node1", "node3"],
    ),
    (
        "random ports dropped from one node to another, one way",
        lambda s: faults.block(s, s.node("node3"), ports="32768:60999", source=s.node("node1"), reject=False),
        "dropped",
        ["node3"],
        ["node1"],
    ),
    (
        "random ports rejected",
        lambda s: faults.block(s, s.node("node1"), ports="32768:60999", source=None, reject=True),
        "rejected",
        ["node1"],
        ["node2", "node3"],
    ),
    (
        "nothing passes between two nodes",
        lambda s: faults.cut(s, s.node("node1"), s.node("node3")),
        "dropped",
        ["node1"],
        ["node3"],
    ),
]


@pytest.mark.parametrize(("what", "inject", "said", "nodes", "peers"), PORTS, ids=[case[0] for case in PORTS])
def test_data_ports(
    sandbox: Sandbox,
    project: Any,
    what: str,
    inject: Callable[[Sandbox], object],
    said: str,
    nodes: list[str],
    peers: list[str],
) -> None:
    inject(sandbox)
    note(sandbox)
    result = examine(project)
    if what == "nothing passes between two nodes":  # both ends are as good a place to look at
        first = bad(result[1])[0]
        assert sorted([*first["nodes"], *first["peers"]]) == ["node1", "node3"]
        assert first["check"] == "data-ports"
        return
    expect(result, "data-ports", nodes, peers=peers, said=said)


@pytest.mark.parametrize("reject", [False, True], ids=["dropped", "rejected"])
def test_the_rendezvous_port_alone_is_blocked(sandbox: Sandbox, project: Any, reject: bool) -> None:
    faults.block(sandbox, sandbox.node("node1"), ports="29555", source=None, reject=reject)
    note(sandbox)
    result = examine(project, {"network.rendezvous_port": 29555})
    said = "rejected" if reject else "dropped"
    expect(result, "rendezvous-port", ["node1"], peers=["node2", "node3"], said=said)


def test_the_rendezvous_port_is_taken(sandbox: Sandbox, project: Any) -> None:
    hold = "import socket,sys; s=socket.socket(); s.bind(('',29556)); s.listen(); print(1,flush=True); sys.stdin.read()"
    argv = [*faults._administrator(sandbox, sandbox.node("node1")), sys.executable, "-c", hold]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        result = examine(project, {"network.rendezvous_port": 29556})
        holder.communicate(b"")
    expect(result, "rendezvous-port", ["node1"], said=os.strerror(errno.EADDRINUSE))


def test_large_packets_are_lost_on_one_pair(sandbox: Sandbox, project: Any) -> None:
    faults.lose_large(sandbox, sandbox.node("node2"), sandbox.node("node3"))
    note(sandbox)
    expect(examine(project), "large-packets", ["node2"], peers=["node3"])


def test_large_packets_are_lost_towards_one_node(sandbox: Sandbox, project: Any) -> None:
    for other in ("node1", "node3"):
        faults.lose_large(sandbox, sandbox.node("node2"), sandbox.node(other))
    note(sandbox)
    expect(examine(project), "large-packets", ["node2"], peers=["node1", "node3"])


def test_the_mtu_differs(sandbox: Sandbox, project: Any) -> None:
    on(sandbox, "node3", "ip", "link", "set", "eth0", "mtu", "1400")
    try:
        expect(examine(project), "mtu", ["node3"], status="warn", said="1400")
    finally:
        on(sandbox, "node3", "ip", "link", "set", "eth0", "mtu", "1500")


def test_a_node_takes_its_own_name_for_a_loopback_address(sandbox: Sandbox, project: Any) -> None:
    text = on(sandbox, "node2", "cat", "/etc/hosts")
    own = "127.0.0.1 localhost\n127.0.1.1 node2\n" + text.replace(" node2\n", " other\n")
    on(sandbox, "node2", "mount", "--bind", placed(sandbox, "node2", "hosts", own), "/etc/hosts")
    try:
        expect(examine(project), "loopback-name", ["node2"], said="127.0.1.1")
    finally:
        on(sandbox, "node2", "umount", "/etc/hosts")


def test_two_nodes_have_the_same_address(sandbox: Sandbox, project: Any) -> None:
    address = sandbox.node("node1").address
    on(sandbox, "node3", "ip", "addr", "add", f"{address}/32", "dev", "lo")
    try:
        expect(examine(project), "duplicate-address", ["node1", "node3"], said=address)
    finally:
        on(sandbox, "node3", "ip", "addr", "del", f"{address}/32", "dev", "lo")


def test_addresses_are_translated_on_the_way(sandbox: Sandbox, project: Any) -> None:
    host = sandbox.node("node2")
    extra = host.address.rpartition(".")[0] + ".240"
    on(sandbox, "node2", "ip", "addr", "add", f"{extra}/24", "dev", "eth0")
    rule = ["POSTROUTING", "-o", "eth0", "-p", "tcp", "-m", "tcp", "!", "--sport", "22", "-j", "SNAT", "--to", extra]
    try:
        faults.in_network(sandbox, host, ["iptables", "-w", "-t", "nat", "-A", *rule])
        expect(examine(project), "nat", ["node2"], peers=["node1", "node3"], said=extra)
    finally:
        faults.in_network(sandbox, host, ["iptables", "-w", "-t", "nat", "-F"])
        on(sandbox, "node2", "ip", "addr", "del", f"{extra}/24", "dev", "eth0")


def wrapper(sandbox: Sandbox, node: str, body: str) -> str:
    """A program on a host that stands for its Python."""
    return placed(sandbox, node, "python", f"#!/bin/sh\n{body}\n")


def with_python(node: str, python: str) -> dict[str, Any]:
    names = ["node1", "node2", "node3"]
    return {"cluster.nodes": [{"name": name, "python": python} if name == node else name for name in names]}


def test_few_open_files(sandbox: Sandbox, project: Any) -> None:
    python = wrapper(sandbox, "node2", f'ulimit -n 256; exec {sys.executable} "$@"')
    expect(examine(project, with_python("node2", python)), "nofile", ["node2"], said="ulimit -n")


def test_shared_memory_is_small(sandbox: Sandbox, project: Any) -> None:
    on(sandbox, "node1", "mount", "-t", "tmpfs", "-o", "size=1m", faults.DISK, "/dev/shm")
    note(sandbox)
    expect(examine(project), "shm", ["node1"], said="1 MiB")


def test_the_disk_is_full(sandbox: Sandbox, project: Any) -> None:
    faults.fill_disk(sandbox, sandbox.node("node3"), path="small", size="1m")
    note(sandbox)
    expect(examine(project, {"cluster.workdir": "~/small"}), "disk", ["node3"], said="1 MiB")


def test_the_workdir_is_read_only(sandbox: Sandbox, project: Any) -> None:
    folder = sandbox.home / "locked"
    on(sandbox, "node1", "mkdir", "-p", str(folder))
    for node in ("node2", "node3"):
        on(sandbox, node, "mkdir", "-p", str(folder))
    on(sandbox, "node1", "mount", "-t", "tmpfs", "-o", "size=100g,ro", faults.DISK, str(folder))
    note(sandbox)
    expect(examine(project, {"cluster.workdir": "~/locked/x"}), "workdir", ["node1"], said="Read-only")


def test_a_data_path_is_missing_on_one_node(sandbox: Sandbox, project: Any) -> None:
    for node in ("node1", "node3"):
        on(sandbox, node, "mkdir", "-p", str(sandbox.home / "data"))
    expect(examine(project, {"train.data": {"path": "~/data"}}), "path", ["node2"], said="~/data")


def test_the_code_differs_on_one_node(sandbox: Sandbox, project: Any) -> None:
    for node in ("node1", "node2", "node3"):
        text = "print(2)" if node == "node2" else "print(1)"
        on(sandbox, node, "sh", "-c", f"mkdir -p {sandbox.home}/code && echo '{text}' > {sandbox.home}/code/train.py")
    changes = {"job.files": {"push": False, "root": "~/code"}}
    expect(examine(project, changes), "code", ["node2"])


def test_another_torch_on_one_node(sandbox: Sandbox, project: Any) -> None:
    version = placed(sandbox, "node3", "torch/version.py", "__version__ = '2.1.0'\ncuda = '11.8'\n")
    on(sandbox, "node3", "touch", version.replace("version.py", "__init__.py"), root=False)
    stub = version.removesuffix("/torch/version.py")
    python = wrapper(sandbox, "node3", f'PYTHONPATH={stub} exec {sys.executable} "$@"')
    expect(examine(project, with_python("node3", python)), "torch", ["node3"], said="2.1.0")


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


def test_the_ssh_server_is_dead(sandbox: Sandbox, project: Any) -> None:
    host = sandbox.node("node2")
    for pid, line in control.host_processes(host).items():
        if "sshd" in line and pid != host.pid:
            os.kill(pid, signal.SIGKILL)
    try:
        expect(examine(project), "reach", ["node2"], said="refuses")
    finally:
        faults.kill(sandbox, host)
        note(sandbox)


def test_a_host_is_off(sandbox: Sandbox, project: Any) -> None:
    faults.kill(sandbox, sandbox.node("node3"))
    note(sandbox)
    expect(examine(project), "reach", ["node3"])


def test_a_host_is_frozen_and_does_not_delay_the_answer_beyond_its_limit(sandbox: Sandbox, project: Any) -> None:
    faults.freeze(sandbox.node("node1"))
    note(sandbox)
    result = examine(project)
    expect(result, "reach", ["node1"], said="no answer")
    assert result[1]["took_s"] < 8


def over_ssh(sandbox: Sandbox, project: Any, **changes: Any) -> dict[str, Any]:
    """The sandbox's hosts as an ordinary cluster."""
    return {
        "cluster": {
            "transport": "ssh",
            "nodes": [{"name": node.name, "address": node.address} for node in sandbox.nodes],
            "user": sandbox.user,
            "identity_file": str(sandbox.identity_file),
            "known_hosts": str(sandbox.known_hosts),
            "ssh_config": "none",
            "python": sys.executable,
            "connect_timeout_s": 3.0,
            "slots": 1,
            **changes,
        }
    }


needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="an ordinary user's sandbox is reached through its keeper only"
)


@needs_root
def test_a_host_key_has_changed(sandbox: Sandbox, project: Any) -> None:
    lines = sandbox.known_hosts.read_text().splitlines()
    keys = [line.split(" ", 1)[1] for line in lines]
    swapped = [line.split(" ", 1)[0] + " " + (keys[0] if i == 1 else keys[i]) for i, line in enumerate(lines)]
    known = project.write("known_hosts", "\n".join(swapped) + "\n")
    expect(examine(project, over_ssh(sandbox, project, known_hosts=str(known))), "host-key", ["node2"])


@needs_root
def test_a_wrong_user(sandbox: Sandbox, project: Any) -> None:
    nodes = [{"name": node.name, "address": node.address} for node in sandbox.nodes]
    nodes[1]["user"] = "nobody"
    expect(examine(project, over_ssh(sandbox, project, nodes=nodes)), "login", ["node2"])


def test_no_python(sandbox: Sandbox, project: Any) -> None:
    expect(examine(project, with_python("node1", "/nowhere/python3")), "python", ["node1"], said="cluster.python")


def test_a_start_up_file_prints_a_banner(sandbox: Sandbox, project: Any) -> None:
    python = wrapper(sandbox, "node2", f'echo "Welcome to the cluster"; exec {sys.executable} "$@"')
    expect(examine(project, with_python("node2", python)), "shell-output", ["node2"], said="Welcome")


def test_a_clock_is_off(sandbox: Sandbox, project: Any) -> None:
    # The wall clock cannot be changed for one host alone; its Python is told another time.
    late = placed(sandbox, "node3", "late.py", "import time; real = time.time; time.time = lambda: real() + 30\n")
    stub = f"import sys;sys.path.insert(0,'{late.removesuffix('/late.py')}');import late;exec(sys.argv.pop(1))"
    body = f'shift 3; exec {sys.executable} -I -S -c "{stub}" "$@"'
    python = wrapper(sandbox, "node3", f'case "$1" in -I) {body};; *) exec {sys.executable} "$@";; esac')
    expect(examine(project, with_python("node3", python)), "clock", ["node3"], status="warn", said="+30")


def test_two_faults_at_once_are_both_told(sandbox: Sandbox, project: Any) -> None:
    faults.block(sandbox, sandbox.node("node2"), ports="32768:60999", source=None, reject=False)
    on(sandbox, "node3", "mount", "-t", "tmpfs", "-o", "size=1m", faults.DISK, "/dev/shm")
    note(sandbox)
    code, said = examine(project)
    assert code == 9
    assert {(one["check"], *one["nodes"]) for one in bad(said)} == {("shm", "node3"), ("data-ports", "node2")}
    assert sum(one["primary"] for one in said["findings"]) == 1


def test_people_see_the_pair_and_the_fix(sandbox: Sandbox, project: Any) -> None:
    faults.block(sandbox, sandbox.node("node3"), ports="32768:60999", source=sandbox.node("node1"), reject=False)
    note(sandbox)
    examine(project)
    done = project.run("doctor")
    assert done.code == 9
    assert "DROP" in done.out
    assert "primary cause: data-ports" in done.out
    assert "fix: on node3: let TCP" in done.out


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
    faults.block(sandbox, sandbox.node("node3"), ports="32768:60999", source=sandbox.node("node1"), reject=False)
    note(sandbox)
    nodes = json.loads(project.run("nccl", "env", "--json").out)["nodes"]
    assert [node["unreached"] for node in nodes] == [["node3"], [], ["node1"]], "answers to node3 are dropped too"
    assert "cannot call node3 that way" in project.run("nccl", "env").out


def test_a_launch_that_asks_the_doctor_starts_nothing_on_a_sick_cluster(sandbox: Sandbox, project: Any) -> None:
    faults.block(sandbox, sandbox.node("node2"), ports="32768:60999", source=None, reject=False)
    note(sandbox)
    examine(project)
    done = project.run("launch", "--doctor")
    assert done.code == 9, done.err
    assert "nothing was started" in done.err
    assert "on node2: let TCP" in done.err
    assert not (project.folder / ".dtctl").exists()


def test_a_launch_that_asks_the_doctor_runs_on_a_healthy_cluster(sandbox: Sandbox, project: Any) -> None:
    examine(project)
    done = project.run("launch", "--doctor")
    assert done.code == 0, done.err


def test_a_shared_folder_is_not_mounted_on_one_node(sandbox: Sandbox, project: Any) -> None:
    folder = f"/var/tmp/dtctl-{secrets.token_hex(4)}"  # all hosts see the machine's own, as if it were on a file server
    on(sandbox, "node1", "mkdir", folder)
    changes = {"train.data": {"path": folder}}
    try:
        code, said = examine(project, changes)
        assert (code, bad(said)) == (0, [])
        assert "shared" in [one["check"] for one in said["findings"]]
        on(sandbox, "node3", "mount", "-t", "tmpfs", "-o", "size=100m", faults.DISK, folder)
        note(sandbox)
        expect(examine(project, changes), "shared", ["node3"], peers=["node1", "node2"], said="findmnt")
        assert on(sandbox, "node1", "ls", "-A", folder) == "", "the doctor's marks are gone"
    finally:
        on(sandbox, "node1", "rm", "-r", folder)


def fake_class(sandbox: Sandbox, node: str, ports: dict[str, tuple[str, str]]) -> None:
    """Lay RDMA ports, as (state, rate) by name, over a host's /sys/class."""
    path = placed(sandbox, node, "infiniband/.keep", "")
    root = path.removesuffix("/infiniband/.keep")
    on(sandbox, node, "rm", path)
    for device, (state, rate) in ports.items():
        files = {"state": state, "rate": rate, "link_layer": "InfiniBand"}
        for name, text in files.items():
            write = 'mkdir -p "${1%/*}" && printf %s "$2" >"$1"'
            on(sandbox, node, "sh", "-c", write, "sh", f"{root}/infiniband/{device}/ports/1/{name}", text, root=False)
    on(sandbox, node, "mount", "--bind", root, "/sys/class")


@pytest.fixture
def infiniband(sandbox: Sandbox) -> Any:
    """Two active ports on every host; node2's second one as the test wants it."""

    def lay(state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> None:
        good = ("4: ACTIVE", "400 Gb/sec (4X NDR)")
        for node in ("node1", "node2", "node3"):
            fake_class(sandbox, node, {"mlx5_0": good, "mlx5_1": (state, rate) if node == "node2" else good})

    yield lay
    for node in ("node1", "node2", "node3"):
        on(sandbox, node, "umount", "/sys/class")


def locking(sandbox: Sandbox, little: str) -> tuple[dict[str, Any], list[str]]:
    """The spec's changes that let one node lock 64 KiB, and the nodes that may not lock enough.

    Nobody without a capability can raise the limit, so where the machine's own is low all nodes have too little.
    """
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    enough = hard == resource.RLIM_INFINITY or hard >= 64 << 20
    python = wrapper(sandbox, little, f'ulimit -l 64; exec {sys.executable} "$@"')
    return with_python(little, python), [little] if enough else ["node1", "node2", "node3"]


@needs_root
def test_little_memory_may_be_locked_where_there_is_rdma(sandbox: Sandbox, project: Any, infiniband: Any) -> None:
    changes, low = locking(sandbox, "node2")
    assert "memlock" not in [one["check"] for one in bad(examine(project, changes, "--quick")[1])]
    infiniband()
    expect(examine(project, changes), "memlock", low, said="node2: soft 65536 bytes")


@needs_root
@pytest.mark.parametrize(
    ("port", "said"), [({"state": "1: DOWN"}, "mlx5_1:1 1: DOWN"), ({"rate": "200 Gb/sec (2X NDR)"}, "200 Gb/sec")]
)
def test_a_port_of_infiniband_is_down_or_slow(
    sandbox: Sandbox, project: Any, infiniband: Any, port: dict[str, str], said: str
) -> None:
    infiniband(**port)
    _, answer = examine(project)
    (found,) = [one for one in bad(answer) if one["check"] != "memlock"]  # this machine's limit may be low everywhere
    assert (found["check"], found["status"], found["nodes"]) == ("rdma", "warn", ["node2"])
    assert said in json.dumps(found)


def test_a_gpu_has_fallen_off_the_bus_says_the_kernel(sandbox: Sandbox, project: Any) -> None:
    xid = "[ 99.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    row = "0, NVIDIA H100 80GB HBM3, 4, 81559, 535.129.03, 0"
    nodes = []
    for node in ("node1", "node2", "node3"):
        tools = placed(sandbox, node, "nvidia-smi", f'#!/bin/sh\ncase "$1" in *query-gpu*) echo "{row}";; esac\n')
        folder = tools.removesuffix("/nvidia-smi")
        said = xid if node == "node3" else ""
        on(
            sandbox,
            node,
            "sh",
            "-c",
            f"printf '#!/bin/sh\\necho \"{said}\"\\n' > {folder}/dmesg; chmod 755 {folder}/dmesg",
            root=False,
        )
        nodes.append(
            {"name": node, "python": wrapper(sandbox, node, f'PATH={folder}:$PATH exec {sys.executable} "$@"')}
        )
    expect(examine(project, {"cluster.nodes": nodes}), "gpu-xid", ["node3"], said="fallen off the bus")


def test_a_host_dies_while_it_is_examined(sandbox: Sandbox, project: Any) -> None:
    examine(project, None, "--quick")  # writes the spec
    process = project.start("doctor", "--json", "--skip", "collective")
    for line in process.stderr:
        if "round 1 of 3" in line:
            break
    faults.kill(sandbox, sandbox.node("node3"))
    note(sandbox)
    done = project.finish(process)
    found = json.loads(done.out)
    expect((done.code, found), "reach", ["node3"])
    assert found["took_s"] < 30


def test_slurm_says_that_the_time_is_over(sandbox: Sandbox, project: Any) -> None:
    examine(project, None, "--quick")
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 300), "SLURM_JOB_NUM_NODES": "3"}
    done = project.run("doctor", "--json", "--quick", env=inside)
    expect((done.code, json.loads(done.out)), "time-left", ["node1"], status="warn", said="sbatch --time")
