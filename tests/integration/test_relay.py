"""Pushes that six virtual hosts pass on to each other: over TLS between them, and with hosts that die meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.launch.files.environment import require_local_uv
from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox
from tests.hosts import Project, spec_text, wait_until, workers
from tests.integration.test_environment import make_wheel

HOSTS = 6
SIZE = 16_000_000


@pytest.fixture(scope="module")
def hosts(sandbox_env: dict[str, str]) -> Iterator[Sandbox]:
    yield control.start_sandbox("relay", nodes=HOSTS)
    control.remove_sandbox("relay")


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
    progress = [event for event in done.events if event["event"] == "push"]
    last = progress[-1]
    assert (last["nodes"], last["nodes_done"]) == (HOSTS, HOSTS)
    assert last["bytes"] == last["of"] > HOSTS * SIZE
    assert [event["bytes"] for event in progress] == sorted(event["bytes"] for event in progress)  # type: ignore[type-var]


def test_hosts_without_ssl_relay_with_an_hmac(project: Project, hosts: Sandbox) -> None:
    """Its library is an empty file on all hosts, as where OpenSSL is missing."""
    if hosts.rootless:
        pytest.skip("the interface is in a world of its own")
    library = subprocess.run(
        ["python3", "-c", "import _ssl; print(_ssl.__file__)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for node in hosts.nodes:
        inside = ["nsenter", "--target", str(node.pid), *control.build_namespace_flags(hosts)]
        subprocess.run([*inside, "mount", "--bind", "/dev/null", library], check=True)
    try:
        before = sent_bytes(hosts)
        done = project.run("launch", "--json")
        sent = sent_bytes(hosts) - before
    finally:
        for node in hosts.nodes:
            inside = ["nsenter", "--target", str(node.pid), *control.build_namespace_flags(hosts)]
            subprocess.run([*inside, "umount", library], check=True)
    assert done.done["status"] == "succeeded", done.err
    notes = [str(event["text"]) for event in done.events if event["event"] == "note"]
    assert len([note for note in notes if "has a Python without ssl" in note]) == 1, notes
    assert SIZE < sent < SIZE * 1.1 + HOSTS * 500_000
    assert len(set(project.printed(str(done.done["run"])).split())) == 2


def test_wheels_are_relayed_between_hosts(project: Project, hosts: Sandbox, tmp_path: Path) -> None:
    """A folder of wheels that this machine alone has; 12 MB, which leave it once for six hosts."""
    if hosts.rootless:
        pytest.skip("the interface is in a world of its own")
    size, folder = 12_000_000, tmp_path.parent / f"{tmp_path.name}-wheels"
    make_wheel(folder, "large", "1.0", ["small"], data=os.urandom(size))
    make_wheel(folder, "small", "2.0")
    (project.folder / "weights.bin").unlink()
    project.write("requirements.txt", "large\n")
    environment = {"requirements": "requirements.txt", "index": [str(folder)], "wheels": "relay"}
    job = {"script": "train.py", "kind": "direct", "environment": environment}
    cluster = {"transport": "sandbox", "nodes": HOSTS, "slots": 1}
    project.write("dtctl.yaml", json.dumps({"cluster": cluster, "job": job}))
    program = "import large, small, pathlib\n"
    program += "print('has', large.VERSION, pathlib.Path(large.__file__).with_name('large.bin').stat().st_size)\n"
    project.write("train.py", program)
    before = sent_bytes(hosts)
    done = project.run("launch", "--json")
    sent = sent_bytes(hosts) - before
    assert done.done["status"] == "succeeded", done.err
    printed = project.printed(str(done.done["run"])).split("\n")
    assert {line for line in printed if line} == {f"has large 1.0 {size}"}
    uv = Path(require_local_uv()).stat().st_size  # brought to hosts that have none, by the same relay
    assert size < sent < size * 1.15 + uv * 1.15 + HOSTS * 500_000
    last = [event for event in done.events if event["event"] == "push"][-1]
    assert last["nodes_done"] == HOSTS
    assert last["bytes"] == last["of"] > HOSTS * size
    before = sent_bytes(hosts)
    assert project.run("launch", "--json").done["status"] == "succeeded"
    assert sent_bytes(hosts) - before < HOSTS * 700_000, "nothing of it is sent again"


def test_hosts_that_cannot_reach_each_other_get_it_from_here(project: Project, hosts: Sandbox) -> None:
    for node in hosts.nodes:
        faults.block_ports(hosts, node, ports="1024:65535", source=None, reject=True)
    try:
        done = project.run("launch", "--json")
    finally:
        faults.remove_host_faults(hosts, hosts.nodes)
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
        faults.limit_bandwidth(hosts, node, rate="40mbit")
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
        faults.remove_host_faults(hosts, hosts.nodes)
    names = {node.name for node in killed}
    assert done.code != 0
    assert pushed(done.events) >= {node.name for node in hosts.nodes} - names
    assert {event["node"] for event in done.events if event.get("state") == "failed"} <= names
    again = project.run("launch", "--json")
    assert again.done["status"] == "succeeded", again.err
    assert len(set(project.printed(str(again.done["run"])).split())) == 2
