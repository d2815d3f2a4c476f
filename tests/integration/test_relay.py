"""Pushes that six virtual hosts pass on to each other: over TLS between them, and with hosts that die meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox
from tests.hosts import Project, spec_text, wait_until, workers

HOSTS = 6
SIZE = 16_000_000


@pytest.fixture(scope="module")
def hosts(sandbox_env: dict[str, str]) -> Iterator[Sandbox]:
    yield control.up("relay", nodes=HOSTS)
    control.down("relay")


@pytest.fixture
def project(hosts: Sandbox, sandbox_env: dict[str, str], tmp_path: Path) -> Project:
    project = Project(tmp_path, {**sandbox_env, "DTCTL_SANDBOX": hosts.name})
    project.write("dtctl.yaml", spec_text(nodes=HOSTS))
    project.write("train.py", "import hashlib; print('sum', hashlib.md5(open('weights.bin', 'rb').read()).hexdigest())")
    (tmp_path / "weights.bin").write_bytes(random.Random(os.urandom(8)).randbytes(SIZE))
    return project


def sent_bytes(hosts: Sandbox) -> int:
    """Bytes that have left this machine for the hosts."""
    return int(Path(f"/sys/class/net/{hosts.bridge}/statistics/tx_bytes").read_text())


def pushed(events: list[dict[str, object]]) -> set[object]:
    return {event["node"] for event in events if event.get("state") == "pushed"}


def test_six_hosts_get_what_leaves_this_machine_once(project: Project, hosts: Sandbox) -> None:
    if hosts.rootless:
        pytest.skip("the interface is in a world of its own")
    before = sent_bytes(hosts)
    done = project.run("launch", "--json")
    assert done.done["status"] == "succeeded", done.err
    assert SIZE < sent_bytes(hosts) - before < SIZE * 1.1 + HOSTS * 500_000  # dtctl's program is sent to each
    assert len(set(project.printed(str(done.done["run"])).split())) == 2  # `sum`, and the same sum everywhere
    assert not [event for event in done.events if event["event"] == "note" and "block" in str(event["text"])]


def test_hosts_that_cannot_reach_each_other_get_it_from_here(project: Project, hosts: Sandbox) -> None:
    for node in hosts.nodes:
        faults.block(hosts, node, ports="1024:65535", source=None, reject=True)
    try:
        done = project.run("launch", "--json")
    finally:
        faults.heal(hosts, hosts.nodes)
    assert pushed(done.events) == {node.name for node in hosts.nodes}
    notes = [event["text"] for event in done.events if event["event"] == "note"]
    assert notes.count("the nodes cannot reach each other: each gets the files from here") == 1, notes


@pytest.mark.parametrize("seed", range(2))
def test_relays_that_are_killed_are_named_and_all_others_get_everything(
    project: Project, hosts: Sandbox, seed: int
) -> None:
    if hosts.rootless:
        pytest.skip("the interface is in a world of its own")
    before = sent_bytes(hosts)
    for node in hosts.nodes:  # slow enough to be killed half-way
        faults.limit(hosts, node, rate="40mbit")
    try:
        process = project.start("launch", "--json")
        wait_until(lambda: sent_bytes(hosts) - before > 7_000_000, what="some blocks have come")
        killed = random.Random(seed).sample(hosts.nodes, 2)
        for node in killed:
            for pid in workers(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        done = project.finish(process)
    finally:
        faults.heal(hosts, hosts.nodes)
    names = {node.name for node in killed}
    assert done.code != 0
    assert pushed(done.events) >= {node.name for node in hosts.nodes} - names
    assert {event["node"] for event in done.events if event.get("state") == "failed"} <= names
    again = project.run("launch", "--json")
    assert again.done["status"] == "succeeded", again.err
    assert len(set(project.printed(str(again.done["run"])).split())) == 2
