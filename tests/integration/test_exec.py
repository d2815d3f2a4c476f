"""`dtctl exec`: commands and a shell inside a run on one of its nodes."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.sandbox.layout import Sandbox
from tests.hosts import DTCTL, Project, wait_until

WAIT = "import time\nopen('out.txt', 'w').write('written')\nprint('up', flush=True)\ntime.sleep(3600)\n"


@pytest.fixture
def run(project: Project, sandbox: Sandbox) -> Iterator[str]:
    """A run whose workers wait."""
    project.write("t.py", WAIT)
    spec = "cluster: {transport: sandbox, nodes: 3, slots: 1}\njob: {script: t.py, kind: direct, env: {A: 'x y'}}\n"
    project.write("dtctl.yaml", spec)
    begun = project.run("launch", "--detach", "--name", project.unique)
    assert begun.code == 0, begun.err
    wait_until(lambda: "up" in project.run("logs", "--node", "node2").out)
    yield project.unique
    project.run("stop", project.unique)


def test_a_command_runs_where_the_workers_run(project: Project, run: str) -> None:
    done = project.run("exec", run, "node2", "--", "hostname; echo $A; cat out.txt; echo; ls $DTCTL_RUN_DIR")
    assert done.code == 0, done.err
    assert done.out.split()[:4] == ["node2", "x", "y", "written"]
    assert "supervisor.json" in done.out
    failed = project.run("exec", run, "node2", "--", "sh", "-c", "echo to stderr >&2; exit 5")
    assert (failed.code, failed.out, "to stderr" in failed.err) == (5, "", True)
    cat = [*DTCTL, "exec", run, "node1", "--", "cat"]
    fed = subprocess.run(cat, cwd=project.folder, env=project.env, input=b"\x00bytes", capture_output=True, check=True)
    assert fed.stdout == b"\x00bytes"


def test_a_shell_has_a_terminal(project: Project, run: str) -> None:
    child, fd = pty.fork()
    if not child:
        os.chdir(project.folder)
        os.execve(DTCTL[0], [*DTCTL, "exec", run, "node1"], {**project.env, "TERM": "xterm"})
    seen = b""
    while b"# " not in seen and b"$ " not in seen:
        seen += os.read(fd, 4096)
    os.write(fd, b"echo $((40+2)) $DTCTL_NODE; tty; exit 3\n")
    try:
        while piece := os.read(fd, 4096):
            seen += piece
    except OSError:  # the other end is closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert b"42 node1" in seen
    assert b"/dev/pts/" in seen


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "number"), [("torchrun", 0), ("direct", 1)])
def test_a_worker_is_killed_as_the_guide_says(project: Project, sandbox: Sandbox, kind: str, number: int) -> None:
    """And neither torchrun nor the shell that the command comes from."""
    guide = (Path(__file__).parents[2] / "docs/guides/to-many-nodes.md").read_text()
    line = re.findall(r"`dtctl exec RUN NODE -- (pkill [^`]+)`", guide)[number]
    project.write("train.py", f"import torch\nimport dtctl.runtime\n{WAIT}")
    job = f"{{script: train.py, kind: {kind}, max_restarts: 1}}"
    project.write("dtctl.yaml", f"cluster: {{transport: sandbox, nodes: 2, slots: 1}}\njob: {job}\n")
    begun = project.run("launch", "--detach", "--name", project.unique)
    assert begun.code == 0, begun.err
    try:
        wait_until(lambda: project.run("logs", "--node", "node2").out.count("up") == 1)
        done = project.run("exec", project.unique, "node2", "--", *shlex.split(line))
        assert done.code == 0, done.err
        wait_until(lambda: "rank 1 on node2 was ended by signal 9" in project.run("status", project.unique).out)
        wait_until(lambda: "up" in project.run("logs", "--node", "node2").out)
    finally:
        project.run("stop", project.unique)


def test_what_is_not_there_is_said(project: Project, run: str) -> None:
    done = project.run("exec", run, "node9", "--", "true")
    assert (done.code, "node1, node2, node3" in done.err) == (7, True)
    assert project.run("exec", "none", "node1", "--", "true").code == 7
