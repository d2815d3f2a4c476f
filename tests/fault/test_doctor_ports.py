"""Rules for a part of the ports that a launch may use, and what is said where not everything was examined."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox
from tests.fault.examining import bad, examine, needs_root, note

pytestmark = [pytest.mark.integration, needs_root]


def blocked(sandbox: Sandbox, project: Any, node: str, ports: str, **changes: Any) -> dict[str, Any]:
    """The only finding of an examination of hosts of which one drops some ports."""
    faults.block_ports(sandbox, sandbox.node(node), ports=ports, source=None, reject=False)
    note(sandbox)
    _, said = examine(project, changes)
    found, *more = [one for one in bad(said) if not one["follows"]]
    assert not more, [found, *more]
    return {**found, "can_train": said["can_train"]}


@pytest.mark.parametrize("ports", ["33000:39000", "52000:58000"])
def test_a_part_of_the_ports_that_workers_are_given(sandbox: Sandbox, project: Any, ports: str) -> None:
    found = blocked(sandbox, project, "node2", ports)
    assert (found["check"], found["status"], found["nodes"]) == ("data-ports", "fail", ["node2"])
    assert "others pass" in found["summary"]
    assert found["can_train"] is False


def test_a_part_of_the_ports_at_which_workers_meet(sandbox: Sandbox, project: Any) -> None:
    found = blocked(sandbox, project, "node1", "22000:26000")
    assert (found["check"], found["status"], found["nodes"]) == ("rendezvous-port", "fail", ["node1"])
    assert "20000:32767" in found["fix"]


def test_the_ports_at_which_workers_meet_when_the_head_node_is_lost(sandbox: Sandbox, project: Any) -> None:
    found = blocked(sandbox, project, "node3", "20000:32767")
    assert (found["check"], found["status"], found["nodes"]) == ("rendezvous-port", "warn", ["node3"])
    assert "20000:32767" in found["fix"]


def test_that_nodes_can_train_is_said_after_a_full_examination_alone(sandbox: Sandbox, project: Any) -> None:
    _, said = examine(project, {"cluster.python": sys.executable}, full=True)
    assert (said["ok"], said["can_train"]) == (True, True)
    for options in (("--quick",), ("--skip", "links"), ("--skip", "collective")):
        code, said = examine(project, {"cluster.python": sys.executable}, *options, full=True)
        assert (code, said["ok"], said["can_train"]) == (0, True, None), options
        missing = {one["check"] for one in said["findings"] if one["missing"]}
        assert missing <= {"stream", "packet-loss", "duplicate-packets", "bandwidth", "latency", "collective"}
        assert missing
    shown = project.run("doctor", "--quick").out
    assert "can train" not in shown
    assert "partly" in shown
