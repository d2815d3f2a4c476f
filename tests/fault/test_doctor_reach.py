"""Nodes that do not answer, not as they should, or not any more."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox
from tests.fault.examining import examine, expect, needs_root, note, over_ssh, placed, with_python, wrapper

pytestmark = pytest.mark.integration


def test_the_ssh_server_is_dead(sandbox: Sandbox, project: Any) -> None:
    host = sandbox.node("node2")
    for pid, line in control.list_host_processes(host).items():
        if "sshd" in line and pid != host.pid:
            os.kill(pid, signal.SIGKILL)
    try:
        expect(examine(project), "reach", ["node2"], said="refuses")
    finally:
        faults.power_off_host(sandbox, host)
        note(sandbox)


def test_a_host_is_off(sandbox: Sandbox, project: Any) -> None:
    faults.power_off_host(sandbox, sandbox.node("node3"))
    note(sandbox)
    expect(examine(project), "reach", ["node3"])


def test_a_host_is_frozen_and_does_not_delay_the_answer_beyond_its_limit(sandbox: Sandbox, project: Any) -> None:
    faults.freeze_host(sandbox.node("node1"))
    note(sandbox)
    result = examine(project)
    expect(result, "reach", ["node1"], said="its SSH server sends nothing")
    assert result[1]["took_s"] < 600, "or it would wait for ever"


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


def test_a_host_dies_while_it_is_examined(sandbox: Sandbox, project: Any) -> None:
    examine(project, None, "--quick")  # writes the spec
    process = project.start("doctor", "--json", "--skip", "collective")
    for line in process.stderr:
        if "round 1 of 3" in line:
            break
    faults.power_off_host(sandbox, sandbox.node("node3"))
    note(sandbox)
    done = project.finish(process)
    found = json.loads(done.out)
    expect((done.code, found), "reach", ["node3"])
    assert found["took_s"] < 600, "or it would wait for TCP to give up, after 15 minutes"
