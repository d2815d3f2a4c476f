"""Whatever ends a run, nothing of it is left on any node, and another run on the same nodes is not disturbed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox
from tests.hosts import Project, spec_text, wait_for_none, wait_until, workers

LIMIT_S = 40.0
"""What ending a run may take beyond the grace on a busy machine; what is to be ended would go on for 600 s."""
GRACE_S = 1.0

WORKER = """\
import os, signal, sys, time
{before}
print("up", flush=True)
time.sleep(600)
"""
POLITE = WORKER.format(before="")
STUBBORN = WORKER.format(before="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
DAEMON = WORKER.format(
    before="""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 256)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Without the run's mark in its environment.
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})
    os._exit(0)
os.wait()
"""
)
SCRIPTS = [
    pytest.param(POLITE, id="polite", marks=pytest.mark.slow),
    pytest.param(STUBBORN, id="stubborn", marks=pytest.mark.slow),
    pytest.param(DAEMON, id="daemon"),
]
LOADERS = WORKER.format(before="import subprocess\nfor _ in range(3): subprocess.Popen(['sleep', '600'])")


@pytest.fixture
def other_run(tmp_path: Path, sandbox: Sandbox, sandbox_env: dict[str, str]) -> Iterator[dict[str, set[int]]]:
    """Another run of the same script, on the same nodes, which has to live through the test."""
    folder = tmp_path / "other"
    folder.mkdir()
    other = Project(folder, sandbox_env)
    other.write("dtctl.yaml", spec_text(grace_s=GRACE_S))
    other.write("train.py", POLITE)
    process = other.start("launch", "--name", other.unique)
    wait_until(lambda: _up(other), 20, "the other run is up")
    before = {node.name: set(workers(node)) for node in sandbox.nodes}
    yield before
    assert process.poll() is None, "the other run was disturbed"
    process.send_signal(signal.SIGINT)
    assert other.finish(process).code == 130


def launch(project: Project, sandbox: Sandbox, script: str, other: dict[str, set[int]], *, workers_each: int = 1):  # type: ignore[no-untyped-def]
    """Start a run and wait until its workers are up on every node."""
    project.write("dtctl.yaml", spec_text(grace_s=GRACE_S).replace("cluster: {", "cluster: {link_timeout_s: 3, "))
    project.write("train.py", script)
    process = project.start("launch", "--json", "--name", project.unique)
    wait_until(lambda: _up(project), 20, "all workers are up")
    wait_until(
        lambda: all(len(ours(sandbox, other)[node.name]) >= 2 + workers_each for node in sandbox.nodes),
        20,
        "all processes of the run are there",
    )
    return process


def _up(project: Project) -> bool:
    logs = (project.folder / ".dtctl/runs" / project.unique / "logs").glob("*/rank-*.log")
    return len([path for path in logs if "up" in path.read_text()]) == 3


def ours(sandbox: Sandbox, other: dict[str, set[int]]) -> dict[str, set[int]]:
    return {node.name: set(workers(node)) - other[node.name] for node in sandbox.nodes}


def nothing_left(sandbox: Sandbox, other: dict[str, set[int]], limit_s: float) -> float:
    def gone() -> bool:
        return not any(ours(sandbox, other).values())

    took = wait_until(gone, limit_s, "no process of the run on any node")
    assert all(other[node.name] <= set(workers(node)) for node in sandbox.nodes), "the other run lost processes"
    return took


@pytest.mark.parametrize("script", [POLITE, STUBBORN, DAEMON, LOADERS], ids=["polite", "stubborn", "daemon", "loaders"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["INT", "TERM", "KILL"])
def test_the_launcher_gets_a_signal(
    project: Project, sandbox: Sandbox, other_run: dict[str, set[int]], number: int, script: str
) -> None:
    process = launch(project, sandbox, script, other_run)
    process.send_signal(number)
    nothing_left(sandbox, other_run, LIMIT_S + GRACE_S)
    done = project.finish(process)
    if number == signal.SIGKILL:
        return
    assert done.code == 128 + number
    assert done.done["status"] == "stopped"
    assert done.done["left_behind"] == 0
    assert "0 processes left on 3 nodes" in done.err


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_worker_crashes(project: Project, sandbox: Sandbox, other_run: dict[str, set[int]], script: str) -> None:
    crash = "time.sleep(1)\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(600)\n"
    process = launch(project, sandbox, script.removesuffix("time.sleep(600)\n") + crash, other_run)
    done = project.finish(process)
    assert done.code == 8
    assert done.done["left_behind"] == 0
    assert done.done["first_failure"]["signal"] == signal.SIGSEGV  # type: ignore[index]
    nothing_left(sandbox, other_run, 0.5)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_ssh_session_of_a_node_is_killed(
    project: Project, sandbox: Sandbox, other_run: dict[str, set[int]], script: str
) -> None:
    process = launch(project, sandbox, script, other_run)
    node = sandbox.nodes[1]
    supervisors = ours(sandbox, other_run)[node.name]
    sessions = {_parent(pid) for pid in supervisors} - supervisors - {node.pid}
    for session in sessions:
        if "sshd" in Path(f"/proc/{session}/cmdline").read_text():
            os.kill(session, signal.SIGKILL)
    nothing_left(sandbox, other_run, LIMIT_S + GRACE_S)
    done = project.finish(process)
    assert done.code == 8
    assert done.done["first_failure"]["node"] == "node2"  # type: ignore[index]
    assert done.done["left_behind"] == 0


def _parent(pid: int) -> int:
    match = re.search(r"^PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_supervisor_of_a_node_is_killed(
    project: Project, sandbox: Sandbox, other_run: dict[str, set[int]], script: str
) -> None:
    process = launch(project, sandbox, script, other_run)
    node = sandbox.nodes[2]
    found = {pid: line for pid, line in workers(node).items() if pid not in other_run[node.name] and " -I -S " in line}
    supervisor = max(found, default=0)
    os.kill(supervisor, signal.SIGKILL)
    nothing_left(sandbox, other_run, LIMIT_S + GRACE_S)
    done = project.finish(process)
    assert (done.code, done.done["left_behind"]) == (8, 0)


def test_the_supervisor_of_a_node_is_told_to_end_and_its_worker_is_not_heard(
    project: Project, sandbox: Sandbox, other_run: dict[str, set[int]]
) -> None:
    """The worker is killed, and a run that has lost it so has not succeeded."""
    process = launch(project, sandbox, STUBBORN, other_run)
    node = sandbox.nodes[2]
    found = {pid: line for pid, line in workers(node).items() if pid not in other_run[node.name] and " -I -S " in line}
    os.kill(max(found), signal.SIGTERM)
    done = project.finish(process)
    nothing_left(sandbox, other_run, LIMIT_S + GRACE_S)
    assert (done.code, done.done["status"], done.done["left_behind"]) == (8, "failed", 0), done.err
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert (failure["node"], failure["rank"], failure["signal"]) == ("node3", 2, signal.SIGKILL)
    assert "dtctl killed it" in failure["summary"]
    exits = [event for event in done.events if event["event"] == "exit"]
    assert {event["node"]: event.get("killed") for event in exits} == dict.fromkeys(("node1", "node2", "node3"), True)


def test_the_link_to_a_node_is_cut(project: Project, sandbox: Sandbox, other_run: dict[str, set[int]]) -> None:
    process = launch(project, sandbox, STUBBORN, other_run)
    node = sandbox.nodes[0]
    # Only this run's connection, so that the other run keeps its own: by the port it comes from.
    ports = _client_ports(process.pid, node.address)
    for port in ports:
        for way in (["INPUT", "-p", "tcp", "--sport", port], ["OUTPUT", "-p", "tcp", "--dport", port]):
            faults.run_in_network(sandbox, node, ["iptables", "-w", "-A", *way, "-j", "DROP"])
    faults.write_recorded_faults(sandbox, ["cut by the test"])
    begun = time.monotonic()
    nothing_left(sandbox, other_run, 3 + LIMIT_S + GRACE_S)  # 3: the link time-out of the spec
    assert time.monotonic() - begun > 2, "it was not the cut link that ended the run"
    done = project.finish(process)
    assert done.code == 8
    assert done.done["first_failure"]["node"] == "node1"  # type: ignore[index]
    assert done.done["left_behind"] == 0, "the launcher looks again over a new connection"


def _client_ports(launcher: int, address: str) -> list[str]:
    """Ports of the connections to an address that a launcher and its children have."""
    children = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True, check=False).stdout
    pids = [str(launcher), *children.split()]
    lines = subprocess.run(["ss", "-Htnp", "dst", address], capture_output=True, text=True, check=True).stdout
    found = [
        line.split()[3].rsplit(":", 1)[1] for line in lines.splitlines() if any(f"pid={pid}," in line for pid in pids)
    ]
    assert found
    return found


def test_a_host_loses_power(project: Project, sandbox: Sandbox) -> None:
    process = launch(project, sandbox, POLITE, {node.name: set() for node in sandbox.nodes})
    faults.power_off_host(sandbox, sandbox.nodes[2])
    faults.write_recorded_faults(sandbox, ["kill node3"])
    done = project.finish(process)
    assert done.code == 8
    assert done.done["first_failure"]["node"] == "node3"  # type: ignore[index]
    assert done.done["left_behind"] is None, "nobody can look at a machine without power"
    assert "a node could not be checked" in done.err
    wait_for_none(*sandbox.nodes[:2])


def test_a_frozen_host_is_named_and_the_others_are_stopped(project: Project, sandbox: Sandbox) -> None:
    process = launch(project, sandbox, POLITE, {node.name: set() for node in sandbox.nodes})
    faults.freeze_host(sandbox.nodes[1])
    faults.write_recorded_faults(sandbox, ["freeze node2"])
    done = project.finish(process)
    assert done.done["first_failure"]["node"] == "node2"  # type: ignore[index]
    wait_for_none(sandbox.nodes[0])
    faults.remove_host_faults(sandbox, sandbox.nodes)
    current = control.find_running_sandbox("main")
    assert current is not None
    wait_until(lambda: all(workers(node) == {} for node in current.nodes), LIMIT_S + GRACE_S, "the thawed run ended")


def test_what_a_finished_job_leaves_behind_is_ended(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text(grace_s=GRACE_S))
    project.write("train.py", DAEMON.rsplit("time.sleep(600)", 1)[0])
    done = project.run("launch", "--json")
    assert (done.code, done.done["left_behind"]) == (0, 0)
    wait_for_none(*sandbox.nodes)
