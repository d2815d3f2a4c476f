"""Nodes are examined before a launch when they may be sick, and left alone when they were well a moment ago."""

from __future__ import annotations

import json
from typing import Any

from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox
from tests.facts import missing


def spec_over_ssh(sandbox: Sandbox) -> str:
    """The virtual hosts as if they were any machines."""
    cluster = {
        "transport": "ssh",
        "nodes": [{"name": node.name, "address": node.address} for node in sandbox.nodes],
        "user": "root", "port": 22, "ssh_config": "none", "slots": 1,
        "identity_file": str(sandbox.identity_file), "known_hosts": str(sandbox.known_hosts),
    }  # fmt: skip
    return json.dumps({"cluster": cluster, "job": {"name": "test", "command": "true", "kind": "command"}})


def block(sandbox: Sandbox) -> None:
    faults.block_ports(sandbox, sandbox.node("node2"), ports="32768:60999", source=None, reject=False)
    faults.write_recorded_faults(sandbox, ["block node2"])


def test_nothing_is_started_on_hosts_that_were_hurt_unless_told_so(sandbox: Sandbox, project: Any) -> None:
    project.write("dtctl.yaml", "cluster: {transport: sandbox}\njob: {name: test, command: 'true', kind: command}\n")
    assert project.run("launch").code == 0
    assert project.run("launch", "--json").events[0]["event"] == "plan"
    block(sandbox)
    refused = project.run("launch")
    assert refused.code == 9, refused.err
    assert "nothing was started" in refused.err
    assert not missing(refused.err, "node2 TCP")
    assert project.run("launch", "--no-doctor").code == 0


def test_machines_are_looked_at_once_an_hour(sandbox: Sandbox, project: Any) -> None:
    project.write("dtctl.yaml", spec_over_ssh(sandbox))
    seen = project.folder / ".dtctl" / "doctor.json"
    assert project.run("launch").code == 0
    ((key, when),) = json.loads(seen.read_text()).items()
    assert project.run("launch").code == 0
    assert json.loads(seen.read_text()) == {key: when}, "the second launch has not looked"
    seen.write_text(json.dumps({key: when - 4000}))
    block(sandbox)
    refused = project.run("launch")
    assert refused.code == 9, refused.err
    assert json.loads(seen.read_text()) == {key: when - 4000}


def test_a_machine_that_is_off_is_the_launch_s_to_tell(sandbox: Sandbox, project: Any) -> None:
    text = json.loads(spec_over_ssh(sandbox))
    text["cluster"]["nodes"][1]["port"] = 9
    project.write("dtctl.yaml", json.dumps(text))
    done = project.run("launch")
    assert done.code == 6, done.err
    assert "node2" in done.err
