"""Nodes that are lost for good: a spare takes the place, or the others go on without."""

from __future__ import annotations

import json

import pytest

from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.hosts import Finished, Project, wait_until

SPEC = """\
cluster: {{transport: sandbox, nodes: {nodes}, slots: 1, connect_timeout_s: 2, link_timeout_s: 3, {more}}}
job: {{name: test, script: train.py, kind: direct, grace_s: 1, max_restarts: {restarts}}}
"""
WAIT = """\
import os, time
own = [os.environ[name] for name in ("DTCTL_ATTEMPT", "DTCTL_NODE", "RANK", "WORLD_SIZE")]
print("RANK", *own, flush=True)
print("MEET", os.environ["MASTER_ADDR"], flush=True)
if os.environ["DTCTL_ATTEMPT"] == "0":
    time.sleep(1000)
"""


def events_of(project: Project) -> str:
    path = project.folder / ".dtctl" / "runs" / project.unique / "events.jsonl"
    return path.read_text() if path.exists() else ""


def _running(project: Project) -> int:
    text = events_of(project)
    return text.count('"state":"running"') if '"event":"started"' in text else 0


def words(project: Project) -> int:
    """How many workers have said all that they say, once all nodes have started theirs."""
    if '"event":"started"' not in events_of(project):
        return 0
    logs = project.folder / ".dtctl" / "runs" / project.unique / "logs"
    return sum("MEET " in path.read_text() for path in logs.glob("*/rank-*.log"))


def launch_and_lose(project: Project, sandbox: Sandbox, lost: int) -> Finished:
    """Launch, end a host as by power loss when the job runs, and wait for the end."""
    project.write("train.py", WAIT)
    process = project.start("launch", "--json", "--name", project.unique)
    # Every worker has said its words: what a host prints in the moment of its death is lost with it.
    wait_until(lambda: 0 < events_of(project).count('"state":"started"') <= words(project), what="it runs")
    faults.power_off_host(sandbox, sandbox.nodes[lost])
    faults.write_recorded_faults(sandbox, [f"kill {sandbox.nodes[lost].name}"])
    return project.finish(process)


def ranks(done: Finished, attempt: int) -> dict[str, tuple[str, str]]:
    """Node -> (rank, world size) in an attempt."""
    rows = (line.split("RANK ", 1)[1].split() for line in done.err.splitlines() if "RANK " in line)
    return {node: (rank, size) for number, node, rank, size in rows if number == str(attempt)}


def test_a_spare_takes_the_place_of_a_node_that_is_lost(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", SPEC.format(nodes="[node1, node2]", more="spares: [node3]", restarts=1))
    done = launch_and_lose(project, sandbox, 1)
    assert done.code == 0, done.err
    assert not missing(done.err, "node2 replaced node3")
    assert ranks(done, 0) == {"node1": ("0", "2"), "node2": ("1", "2")}
    assert ranks(done, 1) == {"node1": ("0", "2"), "node3": ("1", "2")}
    assert done.done["attempts"] == 2
    assert done.done["left_behind"] is None, "the dead host could not be asked"
    plan = json.loads((project.folder / ".dtctl" / "runs" / project.unique / "plan.json").read_text())
    assert [node["name"] for node in plan["nodes"]] == ["node1", "node3"]


@pytest.mark.parametrize("lost", [0, 2], ids=["head", "last"])
def test_the_others_go_on_when_fewer_are_enough(project: Project, sandbox: Sandbox, lost: int) -> None:
    project.write("dtctl.yaml", SPEC.format(nodes="3", more="min_nodes: 2", restarts=1))
    done = launch_and_lose(project, sandbox, lost)
    assert done.code == 0, done.err
    left = [node.name for index, node in enumerate(sandbox.nodes) if index != lost]
    assert ranks(done, 1) == {name: (str(rank), "2") for rank, name in enumerate(left)}
    assert not missing(done.err, f"2 nodes without {sandbox.nodes[lost].name}")
    head = next(node for node in sandbox.nodes if node.name == left[0])
    assert f"MEET {head.address}" in done.err


def test_a_node_that_is_needed_and_does_not_come_back_ends_the_run(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", SPEC.format(nodes="2", more="min_nodes: 2, return_s: 0", restarts=3))
    done = launch_and_lose(project, sandbox, 1)
    assert done.code == 6, done.err
    assert done.done["status"] == "failed"
    assert "node node2" in done.err


def test_a_node_that_is_needed_is_waited_for_until_it_has_booted(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", SPEC.format(nodes="2", more="min_nodes: 2", restarts=1))
    project.write("train.py", WAIT)
    process = project.start("launch", "--json", "--name", project.unique)
    wait_until(lambda: 0 < events_of(project).count('"state":"started"') <= _running(project), what="it runs")
    faults.power_off_host(sandbox, sandbox.nodes[1])
    faults.write_recorded_faults(sandbox, [f"kill {sandbox.nodes[1].name}"])
    wait_until(lambda: "retrying in 1 s, since the run needs this node" in events_of(project), what="it is waited for")
    faults.remove_host_faults(sandbox, [sandbox.nodes[1]])
    done = project.finish(process)
    assert done.code == 0, done.err
    assert ranks(done, 1) == {"node1": ("0", "2"), "node2": ("1", "2")}


def test_a_failure_that_comes_back_at_the_same_place_is_not_tried_for_ever(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", SPEC.format(nodes="1", more="python: null", restarts=50))
    project.write("train.py", "raise SystemExit('no such dataset')")
    done = project.run("launch", "--json")
    assert done.code == 8
    assert done.done["attempts"] == 3
    assert not missing(done.err, "restarted 3 attempts start")
