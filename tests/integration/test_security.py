"""What a run shows to others while it is up: on the nodes, on this machine, and in what it leaves on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox, SandboxNode
from tests.hosts import Project, spec_text, wait_until

SECRET = "hunter2-$(id)-'x'"
TRAIN = """\
import os, sys, time
assert os.environ["API_KEY"] == SECRET
print("up", flush=True)
while not os.path.exists(os.path.expanduser("~/go")): time.sleep(0.02)
""".replace("SECRET", repr(SECRET[::-1]) + "[::-1]")


def homes(sandbox: Sandbox) -> list[Path]:
    return [sandbox.state / "hosts" / node.name / "home" for node in sandbox.nodes]


def let_go(sandbox: Sandbox, *, done: bool) -> None:
    for home in homes(sandbox):
        (home / "go").unlink(missing_ok=True) if done else (home / "go").touch()


@pytest.fixture(params=["", "--detach"], ids=["attended", "detached"])
def up(request: pytest.FixtureRequest, project: Project, sandbox: Sandbox) -> Iterator[Path]:
    """The folder of a run that is up on three nodes."""
    project.write("dtctl.yaml", spec_text().replace("grace_s", "secrets: [API_KEY], grace_s"))
    project.write("train.py", TRAIN)
    project.env = {**project.env, "API_KEY": SECRET}  # a copy: all tests share the one of the sandbox
    options = [request.param] if request.param else []
    process = project.start("launch", "--json", "--name", project.unique, *options)
    folder = project.folder / ".dtctl" / "runs" / project.unique
    logs = [folder / "logs" / f"node{rank + 1}" / f"rank-{rank}.log" for rank in range(3)]
    wait_until(
        lambda: process.poll() or all(log.is_file() and log.read_text() == "up\n" for log in logs), 30, "it is up"
    )
    assert process.poll() in (None, 0), process.communicate()
    yield folder
    let_go(sandbox, done=False)
    wait_until(lambda: '"event":"done"' in (folder / "events.jsonl").read_text(), 30, "the run is over")
    let_go(sandbox, done=True)
    wait_until(lambda: not any(workers_of(node) for node in sandbox.nodes), 10, "all has ended")


def workers_of(node: SandboxNode) -> list[int]:
    return [
        pid
        for pid, line in control.list_host_processes(node).items()
        if line and "sshd" not in line and pid != node.pid
    ]


def listening(node: SandboxNode) -> set[int]:
    """Ports that anything on a host listens on."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{node.pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":  # TCP_LISTEN, include/net/tcp_states.h
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def test_a_run_shows_nothing_to_others_while_it_is_up(up: Path, sandbox: Sandbox, project: Project) -> None:
    for node in sandbox.nodes:
        assert listening(node) == {22}, "dtctl needs no port of its own"
        assert len(workers_of(node)) >= 2
    # Command lines are for everybody to read; here are those of this machine and of all hosts.
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        assert b"hunter2" not in line, line
    # Environments are for the owner alone, as long as nobody loosens that.
    for node in sandbox.nodes:
        for pid in workers_of(node):
            status = Path(f"/proc/{pid}/environ").stat()
            assert (status.st_mode & 0o777, status.st_uid) == (0o400, os.getuid())
    for where in [project.folder / ".dtctl", *(home / ".dtctl" for home in homes(sandbox))]:
        for path in where.rglob("*"):
            # What programs of other tests have written follows their umask.
            of_another = "runs" in path.parts and project.unique not in path.parts[path.parts.index("runs") + 1 :]
            # uv opens its locks to everybody, whatever the umask is; the folder above them is closed.
            of_uv = path.name.endswith(".lock") and "envs" in path.parts
            if path.is_symlink() or path.is_socket() or of_uv or (of_another and path.name != "runs"):
                continue
            assert not path.stat().st_mode & 0o077, f"others may use {path}"
            assert not path.is_file() or b"hunter2" not in path.read_bytes(), path
    for home in homes(sandbox):
        for path in home.rglob("*.sock"):
            assert path.stat().st_mode & 0o777 == 0o600, path


def test_the_dry_run_shows_the_name_of_a_secret_and_never_its_value(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text().replace("grace_s", "secrets: [API_KEY], grace_s"))
    project.write("train.py", "")
    for arguments in (("--dry-run",), ("--dry-run", "--json"), ("--out", "scripts")):
        done = project.run("launch", *arguments, env={"API_KEY": SECRET})
        assert done.code == 0, done.err
        assert "hunter2" not in done.out + done.err
    written = list((project.folder / "scripts").iterdir())
    assert len(written) == 4
    assert not [path for path in written if b"hunter2" in path.read_bytes()]
    assert not [path for path in written if path.stat().st_mode & 0o077]


def test_a_template_cannot_reach_beyond_its_values(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text(nodes=1).replace("grace_s", "secrets: [API_KEY], grace_s"))
    project.write("train.py", "")
    attempts = (
        "{{ plan.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{% include '/etc/passwd' %}",
        "{% include '../dtctl.yaml' %}",
    )
    for text in attempts:
        project.write("templates/node.sh.j2", text + "\n")
        done = project.run("launch", "--dry-run", env={"API_KEY": SECRET})
        assert done.code == 5, (text, done.out)
        assert "hunter2" not in done.out + done.err
