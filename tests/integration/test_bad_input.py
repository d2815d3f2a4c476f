"""What users get wrong: a clear error with its exit code, before anything is started anywhere."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.hosts import Project, spec_text, wait_until, workers

CLIENTS = pytest.mark.parametrize("client", ["openssh", "paramiko"])
JOB = "job: {script: train.py, kind: direct}\n"


def ssh_spec(sandbox: Sandbox, **changes: object) -> str:
    values = {
        "transport": "ssh",
        "nodes": "[" + ", ".join(f"{{name: {n.name}, address: {n.address}}}" for n in sandbox.nodes) + "]",
        "user": sandbox.user,
        "identity_file": sandbox.identity_file,
        "known_hosts": sandbox.known_hosts,
        "ssh_config": "none",
        "connect_timeout_s": 3,
        **changes,
    }
    return "cluster: {" + ", ".join(f"{key}: {value}" for key, value in values.items()) + "}\n" + JOB


def refused(project: Project, sandbox: Sandbox, code: int, *texts: str, spec: str | None = None) -> str:
    """Launch, expect an error with all `texts`, and nothing left or started."""
    if spec is not None:
        project.write("dtctl.yaml", spec)
    if not (project.folder / "train.py").exists():
        project.write("train.py", "print('started')")
    done = project.run("launch")
    assert done.code == code, done.err
    for text in texts:
        assert text in done.err
    assert "Traceback" not in done.err
    assert "started" not in done.out
    # A launch that is refused does not wait for the nodes that it has just begun to talk to.
    wait_until(lambda: not any(workers(node) for node in sandbox.nodes if node.pid), 20, "nothing is left")
    return done.err


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A key that no host accepts."""
    from dtctl.sandbox.files import _write_key

    _write_key(tmp_path / "id")
    return tmp_path / "id"


@CLIENTS
def test_ssh_works_at_all(project: Project, sandbox: Sandbox, client: str) -> None:
    project.write("dtctl.yaml", ssh_spec(sandbox, ssh=client))
    project.write("train.py", "print('started')")
    done = project.run("launch")
    assert done.code == 0, done.err
    assert done.out.count("started") == 3


@CLIENTS
def test_an_unknown_host_key(project: Project, sandbox: Sandbox, tmp_path: Path, client: str) -> None:
    (tmp_path / "empty").write_text("")
    text = refused(
        project, sandbox, 6, "3 nodes failed", "host key is unknown: it presents ssh-ed25519 SHA256:", "ssh-keyscan",
        spec=ssh_spec(sandbox, known_hosts=tmp_path / "empty", ssh=client),
    )  # fmt: skip
    assert text.count("SHA256:") == 3


@CLIENTS
def test_a_changed_host_key(project: Project, sandbox: Sandbox, tmp_path: Path, client: str) -> None:
    lines = sandbox.known_hosts.read_text().splitlines()
    keys = [line.split(" ", 1)[1] for line in lines]
    lines[0] = f"{lines[0].split(' ', 1)[0]} {keys[1]}"
    (tmp_path / "changed").write_text("\n".join(lines) + "\n")
    refused(
        project, sandbox, 6, "host key has changed: it presents", "the recorded key is SHA256:",
        f"{tmp_path / 'changed'}:1", "ssh-keygen -R",
        spec=ssh_spec(sandbox, known_hosts=tmp_path / "changed", ssh=client),
    )  # fmt: skip


@CLIENTS
def test_a_wrong_key(project: Project, sandbox: Sandbox, key: Path, client: str) -> None:
    spec = ssh_spec(sandbox, identity_file=key, ssh=client)
    refused(project, sandbox, 6, "accepted no key; tried:", str(key), spec=spec)


@CLIENTS
def test_a_locked_key(project: Project, sandbox: Sandbox, tmp_path: Path, client: str) -> None:
    locked = tmp_path / "locked"
    locked.write_bytes(sandbox.identity_file.read_bytes())
    locked.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", locked], check=True, capture_output=True)
    refused(project, sandbox, 6, str(locked), "ssh-add", spec=ssh_spec(sandbox, identity_file=locked, ssh=client))


def test_a_name_that_does_not_resolve(project: Project, sandbox: Sandbox) -> None:
    nodes = f"[{{name: a, address: {sandbox.nodes[0].address}}}, no-such-host.invalid]"
    refused(project, sandbox, 6, "no-such-host.invalid", "cannot be resolved", spec=ssh_spec(sandbox, nodes=nodes))


@CLIENTS
def test_a_port_where_nobody_listens(project: Project, sandbox: Sandbox, client: str) -> None:
    refused(project, sandbox, 6, "its SSH port refuses connections", spec=ssh_spec(sandbox, port=2, ssh=client))


def test_a_host_that_does_not_answer(project: Project, sandbox: Sandbox) -> None:
    faults.power_off_host(sandbox, sandbox.nodes[2])
    faults.write_recorded_faults(sandbox, ["kill node3"])
    refused(project, sandbox, 6, "node node3", spec=ssh_spec(sandbox))


def test_no_python_on_the_node(project: Project, sandbox: Sandbox) -> None:
    refused(
        project, sandbox, 6, "/opt/python9 cannot be started on the node", spec=ssh_spec(sandbox, python="/opt/python9")
    )


def test_a_full_disk(project: Project, sandbox: Sandbox) -> None:
    faults.fill_disk(sandbox, sandbox.nodes[1], path=".dtctl", size="200k")
    faults.write_recorded_faults(sandbox, ["full-disk node2"])
    refused(project, sandbox, 6, "the disk is full", "node node2", spec=spec_text())


def test_a_workdir_that_cannot_be_written(project: Project, sandbox: Sandbox) -> None:
    refused(project, sandbox, 6, "/proc/nowhere", "cluster.workdir", spec=ssh_spec(sandbox, workdir="/proc/nowhere"))


def test_a_rendezvous_port_in_use(project: Project, sandbox: Sandbox) -> None:
    spec = spec_text() + "network: {rendezvous_port: 22}\n"
    refused(project, sandbox, 4, "no port for the rendezvous is free on the head node (tried 22)", spec=spec)


def test_another_port_is_taken_when_the_first_is_in_use(project: Project, sandbox: Sandbox) -> None:
    from dtctl.plan.rendezvous import list_rendezvous_ports

    project.write("dtctl.yaml", spec_text(nodes=1))
    project.write("train.py", "import os; print('port', os.environ['MASTER_PORT'])")
    first, second = list_rendezvous_ports(project.unique, 0, None)[:2]
    holder = project.start(
        "sandbox", "exec", "node1", "--", "python3", "-c",
        f"import socket,time; s=socket.create_server(('', {first})); print('held', flush=True); time.sleep(1000)",
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert f"port {second}" in project.run("launch", "--name", project.unique).out
    holder.kill()
    for pid, line in control.list_host_processes(sandbox.nodes[0]).items():
        if "create_server" in line:
            os.kill(pid, signal.SIGKILL)


def test_a_script_that_does_not_exist(project: Project, sandbox: Sandbox) -> None:
    project.write("train.py", "")
    project.write("dtctl.yaml", spec_text().replace("train.py", "trian.py"))
    refused(project, sandbox, 4, "there is no trian.py")


def test_a_script_that_is_not_pushed(project: Project, sandbox: Sandbox) -> None:
    project.write(".gitignore", "train.py\n")
    refused(project, sandbox, 4, "train.py is not among the files that are pushed", ".gitignore", spec=spec_text())


def test_a_program_that_is_not_there(project: Project, sandbox: Sandbox) -> None:
    spec = "cluster: {transport: sandbox, nodes: 3}\njob: {command: no-such-program}\n"
    refused(project, sandbox, 6, "no-such-program: there is no such program on the node", spec=spec)


@pytest.mark.parametrize(
    ("spec", "code", "text"),
    [
        ("", 3, "the spec is empty"),
        ("cluster: [1]\n", 3, "expected keys with values"),
        ("cluster: {transport: ssh, nodes: [a, a]}\n" + JOB, 3, "node a is listed twice"),
        ("cluster: {transport: ssh, nodes: [a], slotz: 1}\n" + JOB, 3, "did you mean `slots`?"),
        ("cluster: {transport: slurm, nodes: 2}\n" + JOB, 7, "this machine"),
    ],
)
def test_specs_that_are_wrong(project: Project, sandbox: Sandbox, spec: str, code: int, text: str) -> None:
    refused(project, sandbox, code, text, spec=spec)


def test_a_shell_start_up_file_that_prints(project: Project, sandbox: Sandbox) -> None:
    """A banner on standard output comes before our first byte, and must not be taken for it."""
    home = sandbox.state / "hosts" / "node1" / "home"
    wrapper = home / "python-with-banner"
    wrapper.write_text("#!/bin/sh\necho 'Welcome to the cluster!'\nexec python3 \"$@\"\n")
    wrapper.chmod(0o755)
    nodes = f"[{{name: a, address: {sandbox.nodes[0].address}}}]"
    spec = ssh_spec(sandbox, nodes=nodes, python=sandbox.home / "python-with-banner")
    refused(project, sandbox, 6, "Welcome to the cluster!", "let it print only in interactive shells", spec=spec)
    wrapper.unlink()


def test_a_line_of_setup_that_fails_is_named(project: Project, sandbox: Sandbox) -> None:
    project.write("train.py", "print('not reached')")
    project.write(
        "dtctl.yaml", spec_text().replace("kind: direct", "kind: direct, setup: ['true', 'ls /not-there', 'true']")
    )
    done = project.run("launch")
    assert done.code == 8, done.err
    assert not missing(done.err, "job.setup /not-there")
    assert "not reached" not in done.out


def test_what_of_a_run_s_output_is_not_there_is_said(project: Project, sandbox: Sandbox) -> None:
    project.write("train.py", "print('here')")
    project.write("dtctl.yaml", spec_text())
    assert project.run("launch", "--name", project.unique).code == 0
    assert project.run("logs", "--rank", "2").out == "[node3:2] here\n"
    asked = project.run("logs", "--rank", "3")
    assert asked.code == 7
    assert not missing(asked.err, "ranks 0 2")
    asked = project.run("logs", "--attempt", "1")
    assert asked.code == 7
    assert not missing(asked.err, "attempt 1")
    asked = project.run("logs", "--grep", "there")
    assert (asked.code, asked.out) == (0, "")
    assert not missing(asked.err, f"{project.unique} line")
    project.write("train.py", "")
    assert project.run("launch", "--name", f"{project.unique}-silent").code == 0
    asked = project.run("logs")
    assert (asked.code, asked.out) == (0, "")
    assert not missing(asked.err, f"{project.unique}-silent nothing")
