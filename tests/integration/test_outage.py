"""The link to a node is out for 12 seconds: without a spare nothing happens, with one nobody runs twice."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox
from tests.hosts import Project, wait_until

OUTAGE_S = 12.0
BUSY = """
import os, time
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
end = time.monotonic() + 15
while time.monotonic() < end: pass
"""
SPEC = """\
cluster: {{transport: sandbox, nodes: [node1, node2], slots: 1{spares}}}
job: {{name: test, script: train.py, kind: direct, grace_s: 1, max_restarts: 1, env: {{FOLDER: "{folder}"}}}}
"""
TRAIN = """\
import os, signal, time
from pathlib import Path

if "STUBBORN":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = Path(os.environ["FOLDER"])
name = "-".join(os.environ[key] for key in ("DTCTL_ATTEMPT", "RANK", "DTCTL_NODE"))
with open(folder / f"{name}-{os.getpid()}", "w") as file:
    while not (folder / "end").exists():
        print(time.time(), file=file, flush=True)
        print("alive", flush=True)
        time.sleep(0.05)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that all hosts see."""
    made = Path(os.environ["DTCTL_SANDBOX_DIR"]) / f"outage-{secrets.token_hex(3)}"
    made.mkdir()
    yield made
    shutil.rmtree(made)


def cut_for(sandbox: Sandbox, name: str, seconds: float) -> None:
    """Drop all that goes between this machine and a host, for so long."""
    node = sandbox.node(name)
    rules = [[chain, way, sandbox.bridge_address, "-j", "DROP"] for chain, way in (("INPUT", "-s"), ("OUTPUT", "-d"))]
    for rule in rules:
        faults.run_in_network(sandbox, node, ["iptables", "-w", "-A", *rule])
    try:
        time.sleep(seconds)
    finally:
        for rule in rules:
            faults.run_in_network(sandbox, node, ["iptables", "-w", "-D", *rule])


def lives(folder: Path, attempt: int) -> dict[str, list[float]]:
    """Rank, node and process of each worker of an attempt -> when it was alive."""
    found = {path.name[2:]: path.read_text().split("\n")[:-1] for path in folder.glob(f"{attempt}-*")}
    return {name: [float(line) for line in lines] for name, lines in found.items() if lines}


@pytest.mark.slow
def test_without_a_spare_the_run_goes_on_with_the_same_workers(
    project: Project, sandbox: Sandbox, folder: Path
) -> None:
    project.write("train.py", TRAIN.replace("STUBBORN", ""))
    project.write("dtctl.yaml", SPEC.format(spares="", folder=folder))
    process = project.start("launch", "--json", "--name", project.unique)
    wait_until(lambda: len(lives(folder, 0)) == 2, what="both run")
    cut_for(sandbox, "node2", OUTAGE_S)
    cut_ended = time.time()
    wait_until(lambda: all(times[-1] > cut_ended + 1 for times in lives(folder, 0).values()), what="both run on")
    log = project.folder / ".dtctl" / "runs" / project.unique / "logs" / "node2" / "rank-1.log"
    size = log.stat().st_size
    wait_until(lambda: log.stat().st_size > size, what="the link carries output again")
    (folder / "end").touch()
    done = project.finish(process)
    assert done.code == 0, done.err
    assert (done.done["attempts"], done.done["left_behind"]) == (1, 0)
    assert len(lives(folder, 0)) == 2
    assert not {"lost", "away"} & {str(event.get("state")) for event in done.events}
    printed = log.read_text().splitlines()
    assert set(printed) == {"alive"}
    assert len(printed) == sum(len(times) for name, times in lives(folder, 0).items() if "node2" in name)


@pytest.mark.slow
def test_a_node_at_a_load_of_30_is_not_lost(project: Project, sandbox: Sandbox, folder: Path) -> None:
    """Its processes share one core with 30 that never rest, for longer than its link may be silent."""
    project.write("train.py", TRAIN.replace("STUBBORN", ""))
    spec = SPEC.format(spares="", folder=folder).replace("slots: 1", "slots: 1, link_timeout_s: 10")
    project.write("dtctl.yaml", spec)
    process = project.start("launch", "--json", "--name", project.unique)
    wait_until(lambda: len(lives(folder, 0)) == 2, what="both run")
    node = sandbox.node("node2")
    argv = control.enter_argv(sandbox, node, [sys.executable, "-c", BUSY])
    for pid in control.list_host_processes(node):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(pid, {max(os.sched_getaffinity(0))})
    others = [subprocess.Popen(argv) for _ in range(30)]
    for other in others:
        other.wait()
    assert process.poll() is None
    (folder / "end").touch()
    done = project.finish(process)
    assert done.code == 0, done.err
    assert (done.done["attempts"], done.done["left_behind"]) == (1, 0)
    assert not {"lost", "away"} & {str(event.get("state")) for event in done.events}


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", ["", "yes"], ids=["polite", "stubborn"])
def test_with_a_spare_the_old_worker_has_ended_before_another_has_its_rank(
    project: Project, sandbox: Sandbox, folder: Path, stubborn: str
) -> None:
    """The cut-off node hears nobody, and ends its workers itself."""
    project.write("train.py", TRAIN.replace("STUBBORN", stubborn))
    project.write("dtctl.yaml", SPEC.format(spares=", spares: [node3]", folder=folder))
    process = project.start("launch", "--json", "--name", project.unique)
    wait_until(lambda: len(lives(folder, 0)) == 2, what="both run")
    cut_for(sandbox, "node2", OUTAGE_S)
    wait_until(lambda: len(lives(folder, 1)) == 2 or process.poll() is not None, 120, "the next attempt runs")
    time.sleep(1)  # in which an old worker would show
    (folder / "end").touch()
    done = project.finish(process)
    assert done.code == 0, done.err
    assert done.done["attempts"] == 2
    before, after = lives(folder, 0), lives(folder, 1)
    last = max(times[-1] for times in before.values())
    first = min(times[0] for times in after.values())
    assert last < first, f"an old worker was alive for {last - first:.2f} s beside a new one"
    assert {name[0] for name in after} == {"0", "1"}
