"""A launcher that was stopped, as by a laptop's lid, knows it, blames no node, and takes the run up."""

from __future__ import annotations

import signal
import time

from dtctl.sandbox.layout import Sandbox
from tests.hosts import Project, spec_text, wait_until, workers

SCRIPT = """\
import os, time
print("attempt", os.environ["DTCTL_ATTEMPT"], flush=True)
while os.environ["DTCTL_ATTEMPT"] == "0" and not os.path.exists("/tmp/go"):
    time.sleep(0.05)
"""


def test_the_job_is_started_again_without_a_restart(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text(grace_s=1).replace("slots", "link_timeout_s: 6, slots"))
    project.write("train.py", SCRIPT)
    process = project.start("launch", "--json", "--name", project.unique)
    log = project.folder / ".dtctl" / "runs" / project.unique / "logs" / "node3" / "rank-2.log"
    wait_until(lambda: log.exists() and "attempt 0" in log.read_text(), what="the job runs")
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: not any(workers(node) for node in sandbox.nodes), what="the nodes have ended it")
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > 3, what="the launcher is away for longer than its loop takes")
    process.send_signal(signal.SIGCONT)
    done = project.finish(process)
    assert done.code == 0, done.err
    kinds = [event["event"] for event in done.events]
    assert kinds.count("launcher-away") == 1
    assert "restart" not in kinds
    assert (done.done["attempts"], done.done["left_behind"], done.done["first_failure"]) == (2, 0, None)
    assert not [event for event in done.events if event.get("state") in ("lost", "failed")]
    assert "--detach" in done.err
    assert log.read_text().splitlines() == ["attempt 0", "attempt 1"]


def test_a_short_stop_changes_nothing(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text(grace_s=1).replace("slots", "link_timeout_s: 120, slots"))
    project.write("train.py", SCRIPT)
    process = project.start("launch", "--json", "--name", project.unique)
    log = project.folder / ".dtctl" / "runs" / project.unique / "logs" / "node3" / "rank-2.log"
    wait_until(lambda: log.exists() and "attempt 0" in log.read_text(), what="the job runs")
    process.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > 4, what="the launcher is away for longer than its loop takes")
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    done = project.finish(process)
    assert done.code == 130, done.err
    assert "launcher-away" not in [event["event"] for event in done.events]
    assert done.done["left_behind"] == 0
