"""Pushes to real hosts that go wrong half-way, or meet each other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox, SandboxNode
from tests.hosts import Project, spec_text, wait_until, workers

pytestmark = pytest.mark.usefixtures("sandbox")


def store(sandbox: Sandbox, node: SandboxNode) -> Path:
    """Where a host keeps pushed trees, as this machine sees it."""
    return sandbox.state / "hosts" / node.name / "home" / ".dtctl" / "node" / "code"


def trees(sandbox: Sandbox, node: SandboxNode) -> set[str]:
    """The digests of the trees that it keeps."""
    return {path.name for path in store(sandbox, node).glob("*") if re.fullmatch("[0-9a-f]+", path.name)}


def parts(sandbox: Sandbox, node: SandboxNode) -> list[str]:
    """What is there of pushes that are not whole, as the host sees it."""
    command = ["find", str(sandbox.home / ".dtctl"), "-name", ".part-*"]
    done = subprocess.run(control.enter_argv(sandbox, node, command), capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_disk_that_fills_up_during_a_push_leaves_nothing(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text())
    project.write("train.py", "print('started')")
    (project.folder / "weights.bin").write_bytes(os.urandom(40 << 20))
    faults.fill_disk(sandbox, sandbox.nodes[1], path=".dtctl", size="24m")
    faults.write_recorded_faults(sandbox, ["full-disk node2"])
    done = project.run("launch")
    assert done.code == 6
    assert "the disk is full" in done.err
    assert "node node2" in done.err
    assert "cluster.workdir" in done.err  # the hint
    assert "started" not in done.out
    for node in sandbox.nodes:
        wait_until(lambda node=node: not parts(sandbox, node), what="half of a tree is gone")


def test_a_launcher_that_is_killed_during_a_push_leaves_nothing(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text())
    project.write("train.py", "print('started')")
    (project.folder / "weights.bin").write_bytes(os.urandom(4 << 20))
    faults.limit_bandwidth(sandbox, sandbox.nodes[0], rate="4mbit")
    faults.write_recorded_faults(sandbox, ["limit node1"])
    process = project.start("launch")
    wait_until(lambda: parts(sandbox, sandbox.nodes[0]), what="a push is under way")
    process.send_signal(signal.SIGKILL)
    project.finish(process)
    wait_until(lambda: not parts(sandbox, sandbox.nodes[0]), what="half of a tree is gone")
    wait_until(lambda: not workers(sandbox.nodes[0]), what="no process is left")


def test_two_launches_of_one_tree_at_once_share_it(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text())
    project.write("train.py", "import os; print('in', os.getcwd())")
    project.write("padding.txt", "at the same time" * 50_000)
    before = [trees(sandbox, node) for node in sandbox.nodes]
    processes = [project.start("launch", "--name", f"{project.unique}-{number}") for number in (1, 2)]
    outs = [project.finish(process) for process in processes]
    assert [done.code for done in outs] == [0, 0], [done.err for done in outs]
    new = [trees(sandbox, node) - old for node, old in zip(sandbox.nodes, before, strict=True)]
    assert [len(names) for names in new] == [1, 1, 1]
    folders = {line.split("in ", 1)[1] for done in outs for line in done.out.splitlines() if "in " in line}
    assert len(folders) == 2  # each works in one of its own
    assert all(not parts(sandbox, node) for node in sandbox.nodes)


def test_code_that_was_changed_on_a_node_is_not_run(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text())
    project.write("train.py", "import helper; print('value', helper.VALUE)")
    project.write("helper.py", "VALUE = 'right'")
    assert project.run("launch").out.count("value right") == 3
    for path in store(sandbox, sandbox.nodes[2]).rglob("helper.py"):
        if path.read_text() == "VALUE = 'right'":
            path.write_text("VALUE = 'wrong'")
    again = project.run("launch")
    assert again.out.count("value right") == 3, again.out
    assert again.err.count("has the code (unchanged)") == 2
