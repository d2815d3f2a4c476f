"""Workers that end for a reason that their own words do not tell."""

from __future__ import annotations

from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.hosts import Project

SPEC = """\
cluster: {transport: sandbox, nodes: [node1, node2], slots: 1}
job: {name: test, script: train.py, kind: direct, grace_s: 1}
"""
FILL = """\
import os, signal, time
if os.environ["RANK"] == "1":
    try:
        with open(os.path.join(os.environ["DTCTL_RUN_DIR"], "big"), "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    except OSError:
        os.kill(os.getpid(), signal.SIGBUS)  # as a mapped file does it
time.sleep(1000)
"""


def test_a_worker_that_died_beside_a_full_disk_is_told_as_that(project: Project, sandbox: Sandbox) -> None:
    node = sandbox.nodes[1]
    faults.fill_disk(sandbox, node, path=".dtctl/node", size="24m")
    faults.write_recorded_faults(sandbox, ["fill-disk node2"])
    project.write("train.py", FILL)
    project.write("dtctl.yaml", SPEC)
    done = project.run("launch", "--json")
    assert done.code == 8, done.err
    first = done.done["first_failure"]
    assert isinstance(first, dict)
    assert (first["node"], first["rank"], first["signal"]) == ("node2", 1, 7)
    assert first["summary"].startswith("the disk of ")
    assert first["summary"].endswith(" is full")
    assert not missing(done.err, "signal 7 SIGBUS disk")
