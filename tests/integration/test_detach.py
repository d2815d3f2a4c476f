"""Runs that go on without the terminal they were launched from."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess

from dtctl.launch.records.events import LauncherReattached
from dtctl.launch.records.record import RunRecord
from dtctl.launch.records.state import is_launcher_alive
from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.hosts import Project, spec_text, wait_for_none, wait_until, workers

COUNT = """\
import time
for n in range(10_000):
    print("line", n, flush=True)
    time.sleep(0.05)
"""


LAST_LINE_WAITS = """\
import os, time
for n in range(60):
    while n == 59 and not os.path.exists("/tmp/{go}"): time.sleep(0.05)
    print("line", n, flush=True)
"""
"""Ends when it is told to, so that a busy machine has time to do something with a run that is on."""


def record(project: Project) -> RunRecord:
    return RunRecord(project.folder / ".dtctl" / "runs" / project.unique)


def start(project: Project, script: str = COUNT) -> None:
    project.write("dtctl.yaml", spec_text(grace_s=1))
    project.write("train.py", script)
    done = project.run("launch", "--detach", "--name", project.unique)
    assert done.code == 0, done.err
    assert done.out.strip() == project.unique


def test_it_goes_on_and_can_be_looked_at_and_stopped(project: Project, sandbox: Sandbox) -> None:
    start(project)
    status = json.loads(project.run("status", "--json").out)
    assert (status["run"], status["status"]) == (project.unique, "running")
    log = record(project).log_path("node2", 1)
    wait_until(lambda: "line 3" in log.read_text(), what="the log grows")
    assert "[node2:1] line 0" in project.run("logs", "--node", "node2").out
    assert project.run("runs").out.count("running") == 1
    stopped = project.run("stop")
    assert stopped.code == 0, stopped.err
    assert "0 processes left on 3 nodes" in stopped.out
    assert json.loads(project.run("status", "--json").out)["status"] == "stopped"
    wait_for_none(*sandbox.nodes)


def test_a_run_on_nodes_that_have_one_already_says_so(project: Project) -> None:
    start(project, "import sys\nif len(sys.argv) > 1: sys.exit()\n" + COUNT)
    second = project.run("launch", "--json", "--name", f"{project.unique}-2", "--", "end")
    assert second.code == 0, second.err
    notes = [event for event in map(json.loads, second.out.splitlines()) if event["event"] == "note"]
    assert [note for note in notes if not missing(note["text"].replace(",", ""), f"{project.unique} node1 node2 node3")]
    assert project.run("stop", project.unique).code == 0
    third = project.run("launch", "--json", "--name", f"{project.unique}-3", "--", "end")
    told = [event["text"] for event in map(json.loads, third.out.splitlines()) if event["event"] == "note"]
    assert not [text for text in told if "is running on" in text]


def test_with_json_standard_output_has_events_alone(project: Project) -> None:
    project.write("dtctl.yaml", spec_text(grace_s=1))
    project.write("train.py", "print('line')")
    done = project.run("launch", "--detach", "--json", "--name", project.unique)
    assert done.code == 0, done.err
    events = [json.loads(line) for line in done.out.splitlines()]
    assert {event["run"] for event in events if event["event"] == "plan"} == {project.unique}


def test_it_ends_by_itself_and_logs_follow_it(project: Project) -> None:
    start(project, "import time\nfor n in range(20):\n    print('line', n, flush=True)\n    time.sleep(0.05)\n")
    followed = project.run("logs", "-f")
    assert [followed.out.count(f"line {n}\n") for n in range(20)] == [3] * 20
    assert json.loads(project.run("status", "--json").out)["status"] == "succeeded"
    assert project.run("watch").code == 0


def test_the_nodes_go_on_when_the_launcher_is_killed_and_stop_still_ends_them(
    project: Project, sandbox: Sandbox
) -> None:
    start(project)
    launcher = record(project).info()
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not is_launcher_alive(launcher))
    assert json.loads(project.run("status", "--json").out)["status"] == "running"
    logs = [sandbox.state / "hosts" / node.name / "home" for node in sandbox.nodes]
    sizes = [path.stat().st_size for home in logs for path in home.glob(f".dtctl/node/runs/{project.unique}/*/*.log")]
    wait_until(
        lambda: (
            [p.stat().st_size for home in logs for p in home.glob(f".dtctl/node/runs/{project.unique}/*/*.log")] > sizes
        ),
        5,
        "the workers go on printing",
    )
    assert "0 processes left on 3 nodes" in project.run("stop").out
    wait_for_none(*sandbox.nodes)


def test_a_link_that_breaks_is_made_again_and_no_line_is_lost(project: Project, sandbox: Sandbox) -> None:
    start(project, COUNT.replace("10_000", "120"))
    log = record(project).log_path("node1", 0)
    wait_until(lambda: log.exists() and "line 5" in log.read_text(), what="the log grows")
    node = sandbox.nodes[0]
    from pathlib import Path

    from dtctl.sandbox import control

    for pid, line in control.list_host_processes(node).items():
        if line.startswith("sshd:") and "listener" not in line:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: json.loads(project.run("status", "--json").out)["status"] == "succeeded", 30, "the end")
    assert Path(log).read_text().splitlines() == [f"line {n}" for n in range(120)]


def test_a_launch_that_fails_says_so_at_once(project: Project) -> None:
    project.write("dtctl.yaml", spec_text())
    done = project.run("launch", "--detach")
    assert done.code == 4
    assert not missing(done.err, "train.py")


def kill_launcher(project: Project) -> None:
    launcher = record(project).info()
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not is_launcher_alive(launcher))


def test_a_run_whose_launcher_was_killed_is_taken_up_again_and_no_line_is_lost(project: Project) -> None:
    start(project, COUNT.replace("10_000", "80"))
    log = record(project).log_path("node1", 0)
    wait_until(lambda: log.exists() and "line 5" in log.read_text(), what="the log grows")
    kill_launcher(project)
    assert json.loads(project.run("status", "--json").out)["status"] in ("running", "succeeded")
    assert "dtctl watch" in project.run("status").out
    watched = project.run("watch")
    assert watched.code == 0, watched.err
    assert "starting a new one" in watched.err
    assert log.read_text().splitlines() == [f"line {n}" for n in range(80)]
    ended = json.loads(project.run("status", "--json").out)
    assert ended["status"] == "succeeded"
    assert ended["done"]["left_behind"] == 0
    ledger = json.loads((record(project).folder / "ledger.json").read_text())
    assert abs(sum(ledger["phases_s"].values()) - ledger["wall_s"]) < 0.05


def test_a_run_that_has_ended_while_nobody_looked_is_told_to_its_end(project: Project, sandbox: Sandbox) -> None:
    start(project, COUNT.replace("10_000", "30"))
    kill_launcher(project)
    wait_until(lambda: all(workers(node) == {} for node in sandbox.nodes), 20, "the job has ended by itself")
    followed = project.run("logs", "-f")
    assert [followed.out.count(f" line {n}\n") for n in range(30)] == [3] * 30
    assert json.loads(project.run("status", "--json").out)["status"] == "succeeded"


def test_a_new_launcher_restarts_the_gang_from_the_same_code(project: Project, sandbox: Sandbox) -> None:
    """The working tree has changed meanwhile; the run has not."""
    script = """\
import os, sys, time
attempt = int(os.environ["DTCTL_ATTEMPT"])
print("attempt", attempt, flush=True)
while attempt == 0 and not os.path.exists("/tmp/go"):
    time.sleep(0.05)
sys.exit(3 if attempt == 0 and os.environ["RANK"] == "1" else 0)
"""
    project.write("dtctl.yaml", spec_text(grace_s=1).replace("grace_s: 1", "grace_s: 1, max_restarts: 1"))
    project.write("train.py", script)
    done = project.run("launch", "--detach", "--name", project.unique)
    assert done.code == 0, done.err
    kill_launcher(project)
    project.write("train.py", "raise SystemExit('not this one')")
    from dtctl.sandbox import control

    for node in sandbox.nodes:
        subprocess.run(control.enter_argv(sandbox, node, ["touch", "/tmp/go"]), check=True)
    try:
        watched = project.run("watch")
    finally:
        for node in sandbox.nodes:
            subprocess.run(control.enter_argv(sandbox, node, ["rm", "-f", "/tmp/go"]), check=True)
    assert watched.code == 0, watched.err
    assert record(project).log_path("node2", 1).read_text().splitlines() == ["attempt 0", "attempt 1"]
    assert json.loads(project.run("status", "--json").out)["done"]["attempts"] == 2


def test_who_watches_a_run_reads_why_it_failed(project: Project) -> None:
    start(project, 'import os, sys, time\nprint("here", flush=True)\ntime.sleep(2)\nsys.exit(3)\n')
    watched = project.run("watch")
    assert watched.code == 8
    assert re.search(r"first failure: rank \d on node\d \(exit code 3\): here", watched.err), watched.err
    assert "log: " in watched.err


def test_two_who_take_up_a_run_at_once_make_one_launcher(project: Project) -> None:
    start(project, LAST_LINE_WAITS.format(go=project.unique))
    kill_launcher(project)
    both = [project.start("logs", "-f") for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        assert "line" in process.stdout.readline()  # it follows the run
    wait_until(
        lambda: any(isinstance(event, LauncherReattached) for event in record(project).events()), what="it is taken up"
    )
    for host in ("node1", "node2", "node3"):
        assert project.run("sandbox", "exec", host, "--", "touch", f"/tmp/{project.unique}").code == 0
    for process in both:
        ended = project.finish(process)
        assert ended.code == 0, ended.err
        assert ended.out.count(" line 59\n") == 3
    events = [event for event in record(project).events() if isinstance(event, LauncherReattached)]
    assert len(events) == 1
