"""The sandbox itself: hosts that are apart from each other, faults that are seen from inside, and nothing left."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl import node_facts
from dtctl.sandbox import control, faults, layout
from dtctl.sandbox.layout import Sandbox
from tests.facts import raises
from tests.hosts import Project, wait_until


def sh(sandbox: Sandbox, host: str, script: str, limit_s: float = 20) -> str:
    argv = control.enter_argv(sandbox, sandbox.node(host), ["sh", "-c", script])
    return subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False).stdout.strip()


CONNECT = """python3 -c "
import socket, sys
try:
    with socket.create_connection(('{host}', {port}), timeout=1) as s: print('connected', len(s.recv(3)))
except Exception as exc: print(type(exc).__name__)
" """


def reach(sandbox: Sandbox, source: str, target: str, port: int = 22) -> str:
    return sh(sandbox, source, CONNECT.format(host=target, port=port))


def test_hosts_are_apart(sandbox: Sandbox) -> None:
    for node in sandbox.nodes:
        assert sh(sandbox, node.name, "hostname") == node.name
        assert sh(sandbox, node.name, "pwd; echo ~") == f"{sandbox.home}\n{sandbox.home}"
        sh(sandbox, node.name, f"echo {node.name} > ~/mine; echo {node.name} > /dev/shm/mine")
    assert [sh(sandbox, node.name, "cat ~/mine /dev/shm/mine") for node in sandbox.nodes] == [
        f"{node.name}\n{node.name}" for node in sandbox.nodes
    ]
    assert sh(sandbox, "node1", f"ls -A {sandbox.state}/hosts") == "", "a host sees the files of others"
    assert "sshd" in sh(sandbox, "node1", "ps ax")
    assert len(sh(sandbox, "node1", "ps ax -o pid=").splitlines()) < 8, "a host sees the processes of others"
    sh(sandbox, "node1", "rm ~/mine")


@pytest.mark.parametrize("below_tmp", [False, True])
def test_hosts_have_their_own_tmp_whatever_tmpdir_is(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, below_tmp: bool
) -> None:
    folder = tmp_path / "mine" if below_tmp else Path.home() / ".cache" / f"dtctl-tmpdir-{os.getpid()}"
    folder.mkdir()
    (folder / "of-this-machine").touch()
    env = {"DTCTL_SANDBOX": "tmpdir", "TMPDIR": str(folder)}
    monkeypatch.setenv("TMPDIR", str(folder))
    try:
        up = project.run("sandbox", "up", "--nodes", "2", env=env)
        assert up.code == 0, up.err
        sandbox = control.find_running_sandbox("tmpdir")
        assert sandbox is not None
        mine = f"/tmp/dtctl-mine-{os.getpid()}"
        for node in sandbox.nodes:
            assert sh(sandbox, node.name, f"ls {mine}* 2>/dev/null; touch {mine}-{node.name}; ls {mine}*") == (
                f"{mine}-{node.name}"
            )
            seen = "" if below_tmp else "of-this-machine"
            assert sh(sandbox, node.name, f"ls {folder} 2>/dev/null") == seen, "the machine's own folder"
            assert sh(sandbox, node.name, "mktemp -u").startswith("/tmp/")
        assert not list(Path("/tmp").glob(f"{Path(mine).name}*"))
    finally:
        control.remove_sandbox("tmpdir")
        shutil.rmtree(folder)


def test_openssh_logs_in_with_what_status_says(project: Project, sandbox: Sandbox) -> None:
    status = json.loads(project.run("sandbox", "status", "--json").out)
    assert status["slurm"] is False
    for node in status["nodes"]:
        ssh = node["ssh"]
        argv = ["ssh", "-F", "none", "-p", str(ssh["port"]), "-i", ssh["identity_file"], "-o", "BatchMode=yes"]
        argv += ["-o", f"UserKnownHostsFile={ssh['known_hosts']}", "-o", "StrictHostKeyChecking=yes"]
        done = subprocess.run(
            [*argv, f"{ssh['user']}@{node['address']}", "hostname"], capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == node["name"], done.stderr


def test_hosts_reach_each_other_by_name(sandbox: Sandbox) -> None:
    assert reach(sandbox, "node1", "node2") == "connected 3"
    assert reach(sandbox, "node3", "node1") == "connected 3"
    assert reach(sandbox, "node1", "node2", 23) == "ConnectionRefusedError"
    assert reach(sandbox, "node1", "no-such-host") == "gaierror"


def test_a_cut_cable(sandbox: Sandbox) -> None:
    faults.disconnect_host(sandbox, sandbox.node("node2"), None)
    assert reach(sandbox, "node1", "node2") != "connected 3"
    assert reach(sandbox, "node1", "node3") == "connected 3"
    faults.remove_host_faults(sandbox, sandbox.nodes)
    assert reach(sandbox, "node1", "node2") == "connected 3"


def test_a_cut_between_two(sandbox: Sandbox) -> None:
    faults.disconnect_host(sandbox, sandbox.node("node1"), sandbox.node("node2"))
    assert reach(sandbox, "node1", "node2") == "TimeoutError"
    assert reach(sandbox, "node2", "node1") == "TimeoutError"
    assert reach(sandbox, "node3", "node2") == "connected 3"
    faults.remove_host_faults(sandbox, sandbox.nodes)


def test_silence_is_told_from_refusal(sandbox: Sandbox) -> None:
    one, two = sandbox.node("node1"), sandbox.node("node2")
    faults.block_ports(sandbox, one, ports="22", source=two, reject=False)
    faults.block_ports(sandbox, one, ports="20:23", source=sandbox.node("node3"), reject=True)
    assert reach(sandbox, "node2", "node1") == "TimeoutError"
    assert reach(sandbox, "node3", "node1") == "ConnectionRefusedError"
    faults.remove_host_faults(sandbox, sandbox.nodes)
    assert reach(sandbox, "node2", "node1") == "connected 3"


def test_large_packets_are_lost(sandbox: Sandbox) -> None:
    send = (
        "python3 -c \"import socket; s=socket.create_connection(('node1', 22), timeout=2); s.recv(99); "
        "s.sendall(b'SSH-2.0-x' + b'y' * {size} + bytes([13, 10])); "
        'print(len(s.recv(99)) > 0)" 2>&1 | tail -1'
    )
    faults.drop_large_packets(sandbox, sandbox.node("node1"), sandbox.node("node2"))
    assert sh(sandbox, "node2", send.format(size=10)) == "True"
    assert "timed out" in sh(sandbox, "node2", send.format(size=3000))
    faults.remove_host_faults(sandbox, sandbox.nodes)
    assert "timed out" not in sh(sandbox, "node2", send.format(size=3000))


def test_a_limited_cable(sandbox: Sandbox) -> None:
    faults.limit_bandwidth(sandbox, sandbox.node("node2"), rate="10mbit")
    assert "tbf" in sh(sandbox, "node2", "tc qdisc show dev eth0 || /sbin/tc qdisc show dev eth0")
    faults.remove_host_faults(sandbox, sandbox.nodes)
    assert "tbf" not in sh(sandbox, "node2", "tc qdisc show dev eth0 || /sbin/tc qdisc show dev eth0")


def test_a_full_disk(sandbox: Sandbox) -> None:
    faults.fill_disk(sandbox, sandbox.node("node3"), path="small", size="64k")
    assert "No space left" in sh(sandbox, "node3", "head -c 100000 /dev/zero > ~/small/x || cat 2>&1", 5) or (
        sh(sandbox, "node3", "stat -c %s ~/small/x") == "65536"
    )
    faults.remove_host_faults(sandbox, sandbox.nodes)
    assert sh(sandbox, "node3", "ls ~/small") == ""


def test_two_who_want_a_sandbox_at_once_get_the_same_one(sandbox_env: dict[str, str]) -> None:
    name = f"twice-{os.getpid()}"
    code = (
        "import sys; from dtctl.sandbox import control; print(control.ensure_sandbox_up(sys.argv[1], nodes=2).keeper)"
    )
    try:
        started = [
            subprocess.Popen([sys.executable, "-c", code, name], env=sandbox_env, stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        keepers = [process.communicate(timeout=600)[0] for process in started]
    finally:
        control.remove_sandbox(name)
    assert len(set(keepers)) == 1, keepers
    assert int(keepers[0]) > 0


def test_what_cannot_be_a_fault(project: Project, sandbox: Sandbox) -> None:
    for arguments, code, text in (
        (("cut", "node9"), 7, "the sandbox has no host node9"),
        (("drop", "node1", "--port", "x"), 2, "'x' is not a port"),
        (("drop", "node1", "--port", "70000"), 2, "is not a port"),
        (("loss", "node1", "--percent", "0"), 2, "is not a share of packets"),
        (("limit", "node1", "--rate", "fast"), 2, "'fast' is not a rate"),
    ):
        done = project.run("sandbox", "fault", *arguments)
        assert (done.code, text in done.err) == (code, True), done.err


def test_faults_are_listed_until_healed(project: Project, sandbox: Sandbox) -> None:
    assert project.run("sandbox", "fault", "freeze", "node1").code == 0
    assert project.run("sandbox", "fault", "list").out == "freeze node1\n"
    assert project.run("sandbox", "heal").code == 0
    assert project.run("sandbox", "fault", "list").out == ""


def test_exec_passes_everything_through(project: Project, sandbox: Sandbox) -> None:
    done = project.run("sandbox", "exec", "node2", "--", "sh", "-c", 'echo $0 "$1"; exit 7', "a b", "--json")
    assert (done.code, done.out) == (7, "a b --json\n")
    assert project.run("sandbox", "exec", "node2", "--").code == 2


@pytest.mark.parametrize("record", ["kept", "of an older version"])
def test_up_and_down_leave_nothing(sandbox_env: dict[str, str], record: str) -> None:
    made = control.start_sandbox("leftovers", nodes=4 if record == "kept" else 1)
    pids = [made.keeper, *(pid for node in made.nodes for pid in control.list_host_processes(node))]
    with raises(Exception, "already"):
        control.start_sandbox("leftovers", nodes=2)
    faults.freeze_host(made.nodes[0])
    if record != "kept":
        (made.state / "keeper.pid").write_text(str(made.keeper))
    assert control.remove_sandbox("leftovers")
    wait_until(lambda: not any(node_facts.start_ticks(pid) for pid in pids), what="no process is left")
    assert not made.state.exists()
    if os.getuid() == 0:
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        assert layout.compute_sandbox_tag(made.state) not in links
    assert not control.remove_sandbox("leftovers")


def test_two_sandboxes_do_not_meet(sandbox: Sandbox) -> None:
    other = control.start_sandbox("other", nodes=2)
    try:
        assert not {node.address for node in other.nodes} & {node.address for node in sandbox.nodes}
        assert sh(other, "node1", "hostname") == "node1"
        assert reach(other, "node1", "node2") == "connected 3"
    finally:
        control.remove_sandbox("other")
    assert sh(sandbox, "node1", "hostname") == "node1"


def test_a_dead_keeper_takes_its_hosts_along(sandbox_env: dict[str, str]) -> None:
    made = control.start_sandbox("crash", nodes=2)
    os.kill(made.keeper, signal.SIGKILL)
    wait_until(lambda: not any(node_facts.start_ticks(node.pid) for node in made.nodes), what="the hosts have ended")
    assert control.find_running_sandbox("crash") is None
    again = control.start_sandbox("crash", nodes=1)
    assert len(again.nodes) == 1
    control.remove_sandbox("crash")


PACKAGES = """
    typer paramiko yaml _yaml pydantic pydantic_core annotated_types typing_extensions.py typing_inspection jinja2
    markupsafe cryptography cffi _cffi_backend* bcrypt nacl shellingham rich pygments markdown_it mdurl click
    annotated_doc *.dist-info
"""


@pytest.fixture
def ordinary_user(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A user without rights, and a folder where it finds dtctl; the user is gone afterwards."""
    if os.getuid() != 0:
        pytest.skip("the whole suite runs as an ordinary user already")
    name = f"dtctl{os.getpid() % 100_000}"
    subprocess.run(["useradd", "--create-home", "--shell", "/bin/sh", name], check=True)
    packages = Path(pwd.getpwnam(name).pw_dir) / "packages"
    source = Path(sysconfig.get_paths()["purelib"])
    packages.mkdir()
    for pattern in PACKAGES.split():
        for path in source.glob(pattern):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, packages / path.name)
    root = Path(__file__).parents[2]
    shutil.copytree(root / "dtctl", packages / "dtctl")
    shutil.copytree(root / "templates", packages / "templates")
    subprocess.run(["chown", "-R", name, packages.parent], check=True)
    yield name, packages
    subprocess.run(["pkill", "-KILL", "-u", name], check=False)
    wait_until(lambda: subprocess.run(["userdel", "-f", "-r", name], capture_output=True, check=False).returncode != 8)


def test_an_ordinary_user_has_a_sandbox_too(ordinary_user: tuple[str, Path]) -> None:
    name, packages = ordinary_user
    python = next(p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(p).exists())
    script = f"""
set -e
cd; unset DTCTL_SANDBOX_DIR DTCTL_SANDBOX; export PYTHONPATH={packages} NO_COLOR=1 PYTHONDONTWRITEBYTECODE=1
dtctl() {{ {python} -m dtctl "$@"; }}
dtctl sandbox up --nodes 2
test "$(dtctl sandbox exec node2 -- hostname)" = node2
mkdir p; cd p
printf 'cluster: {{transport: sandbox, nodes: 2}}\\njob: {{script: t.py, kind: direct}}\\n' > dtctl.yaml
echo 'import os, socket; print("HELLO", socket.gethostname(), os.environ["RANK"], os.getuid())' > t.py
dtctl launch
dtctl sandbox fault drop node1 --port 22
! dtctl launch --set cluster.connect_timeout_s=1
dtctl sandbox fault kill node2
dtctl sandbox heal
dtctl launch
dtctl sandbox down
"""
    done = subprocess.run(
        ["runuser", "-u", name, "--", "sh", "-c", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    uid = pwd.getpwnam(name).pw_uid
    assert done.stdout.count(f"HELLO node1 0 {uid}") == 2
    assert done.stdout.count(f"HELLO node2 1 {uid}") == 2
    assert "0 processes left on 2 nodes" in done.stderr

    def left() -> str:
        return subprocess.run(["pgrep", "-u", name], capture_output=True, text=True, check=False).stdout

    wait_until(lambda: not left(), what="no process of the user is left")


def test_tmp_of_a_host_is_its_own_wherever_the_files_lie(tmp_path: Path, sandbox_env: dict[str, str]) -> None:
    """The state of the sandbox and the code of dtctl lie below /tmp here, as in a clone that was made there."""
    import dtctl

    root = tmp_path / "clone"
    shutil.copytree(Path(dtctl.__file__).parent, root / "dtctl")
    shutil.copytree(Path(dtctl.__file__).parent.parent / "templates", root / "templates")
    env = {**sandbox_env, "DTCTL_SANDBOX_DIR": str(tmp_path / "state"), "DTCTL_SANDBOX": "tmp", "PYTHONPATH": str(root)}
    project = Project(tmp_path / "job", env)
    project.folder.mkdir()
    project.write("t.py", "import os, dtctl; print(sorted(os.listdir('/tmp')), dtctl.__file__)\n")
    project.write(
        "dtctl.yaml", "cluster: {transport: sandbox, nodes: 2, slots: 1}\njob: {script: t.py, kind: direct}\n"
    )
    try:
        made = project.finish(project.start("sandbox", "up", "--nodes", "2"))
        assert made.code == 0, made.err
        for host in ("node1", "node2"):
            marked = project.run("sandbox", "exec", host, "--", f"ls /tmp; touch /tmp/of-{host}; ls /tmp")
            assert f"of-{host}" in marked.out
            assert "of-node1" not in marked.out or host == "node1"
        done = project.finish(project.start("launch", "--set", f"job.env.PYTHONPATH={root}"))
        assert done.code == 0, done.err
        assert str(root) in done.out
        assert not Path("/tmp/of-node1").exists()
    finally:
        project.run("sandbox", "down")


def test_a_sandbox_on_which_a_run_is_running_is_not_removed_unasked(
    tmp_path: Path, sandbox_env: dict[str, str]
) -> None:
    project = Project(tmp_path, {**sandbox_env, "DTCTL_SANDBOX": "busy"})
    project.write(
        "dtctl.yaml", "cluster: {transport: sandbox, nodes: 1}\njob: {command: [sleep, '10000'], grace_s: 1}\n"
    )
    assert project.run("sandbox", "up", "--nodes", "1").err.startswith("sandbox busy: 1 host up")
    try:
        assert project.run("launch", "--detach", "--name", project.unique).code == 0
        refused = project.run("sandbox", "down")
        assert (refused.code, project.unique in refused.err, "--yes" in refused.err) == (7, True, True), refused.err
        assert json.loads(project.run("status", "--json").out)["status"] == "running"
        assert project.run("stop").code == 0
        down = project.run("sandbox", "down")
        assert (down.code, "is removed" in down.err) == (0, True), down.err
    finally:
        assert project.run("sandbox", "down", "--force").code == 0
