"""A run is found, followed and stopped from a control machine that has not launched it."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.launch.records.record import RunRecord
from dtctl.launch.records.state import is_launcher_alive
from dtctl.sandbox.layout import Sandbox
from tests.hosts import Project, spec_text, wait_for_none, wait_until

COUNT = """\
import os, sys, time
open("own.txt", "w").write(os.environ["RANK"])
for n in range({lines}):
    print("line", n, flush=True)
    time.sleep(0.05)
sys.exit({code} if os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture
def other(project: Project) -> Project:
    """A folder of another control machine with the same spec; it knows of no run."""
    folder = project.folder.parent / "other"
    folder.mkdir()
    return replace(project, folder=folder, _running=[])


def start(project: Project, other: Project, *, lines: int = 100_000, code: int = 0, detach: bool = True) -> None:
    for each in (project, other):
        each.write("dtctl.yaml", spec_text(grace_s=1).replace("grace_s: 1", "grace_s: 1, max_restarts: 3"))
    project.write("train.py", COUNT.format(lines=lines, code=code))
    if detach:
        done = project.run("launch", "--detach", "--name", project.unique)
        assert done.code == 0, done.err


def found(other: Project, run: str) -> dict[str, object]:
    listed = other.run("runs", "--nodes", "--json")
    assert listed.code == 0, listed.err
    (row,) = [row for row in json.loads(listed.out)["runs"] if row["run"] == run]
    return row


def test_it_is_listed_shown_and_stopped(project: Project, other: Project, sandbox: Sandbox) -> None:
    start(project, other)
    row = found(other, project.unique)
    assert (row["status"], row["detached"], sorted(row["nodes"])) == ("running", True, ["node1", "node2", "node3"])  # type: ignore[call-overload]
    assert f"--name {project.unique}" in str(row["command"])
    assert "@" in str(row["launched_from"])
    assert json.loads(other.run("status", project.unique, "--json").out)["status"] == "running"
    logs = other.run("logs", project.unique, "--node", "node2")
    assert logs.out.startswith("[node2:1] line 0\n")
    assert "node1" not in logs.out
    stopped = other.run("stop", project.unique, "--json")
    assert stopped.code == 0, stopped.err
    assert json.loads(stopped.out)["left_behind"] == 0
    wait_for_none(*sandbox.nodes)
    # Its launcher has heard who it was, restarts nothing and blames nobody.
    state = lambda: json.loads(project.run("status", "--json").out)  # noqa: E731
    wait_until(lambda: state()["done"], what="the launcher has ended")
    assert (state()["status"], state()["done"]["attempts"], state()["done"]["first_failure"]) == ("stopped", 1, None)
    assert {statuses(project, project.unique), statuses(other, project.unique, here=False)} == {"stopped"}


def statuses(project: Project, run: str, *, here: bool = True) -> str:
    """What all commands say of a run's end; all of it, where they do not agree."""
    told = {str(found(project, run)["status"]), json.loads(project.run("status", run, "--json").out)["status"]}
    lines = project.run("runs", "--nodes").out.splitlines()
    if here:
        lines += project.run("runs").out.splitlines()
        told.add(
            next(row["status"] for row in json.loads(project.run("runs", "--json").out)["runs"] if row["run"] == run)
        )
    told |= {line.split()[1] for line in lines if line.startswith(run)}
    return " and ".join(sorted(told))


@pytest.mark.parametrize("how", ["stop", "interrupt", "fail", "succeed"])
def test_all_commands_agree_on_how_a_run_has_ended(project: Project, other: Project, how: str) -> None:
    start(project, other, lines=100_000 if how in ("stop", "interrupt") else 3, code=3 * (how == "fail"), detach=False)
    launched = project.start("launch", "--name", project.unique, "--set", "job.max_restarts=0")
    if how in ("stop", "interrupt"):
        wait_until(lambda: "line 0" in project.printed(project.unique), what="it runs")
        if how == "stop":
            assert project.run("stop", project.unique).code == 0
        else:
            launched.send_signal(signal.SIGINT)
    project.finish(launched)
    expected = {"fail": "failed", "succeed": "succeeded"}.get(how, "stopped")
    assert {statuses(project, project.unique), statuses(other, project.unique, here=False)} == {expected}


def test_a_run_that_is_stopped_without_its_launcher_counts_as_stopped(project: Project, other: Project) -> None:
    start(project, other)
    launcher = RunRecord(project.folder / ".dtctl" / "runs" / project.unique).info()
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not is_launcher_alive(launcher))
    assert project.run("stop", project.unique).code == 0
    assert {statuses(project, project.unique), statuses(other, project.unique, here=False)} == {"stopped"}


def test_it_is_watched_to_its_end(project: Project, other: Project) -> None:
    start(project, other, lines=40)
    watched = other.run("watch", project.unique)
    assert watched.code == 0, watched.err
    assert [watched.out.count(f" line {n}\n") for n in range(40)] == [3] * 40
    assert found(other, project.unique)["status"] == "succeeded"
    fetched = other.run("fetch", project.unique, "--json")
    assert fetched.code == 0, fetched.err
    assert {path.name for path in Path(json.loads(fetched.out)["folder"]).iterdir()} == {"node1", "node2", "node3"}
    assert (other.folder / ".dtctl" / "outputs" / project.unique / "node3" / "own.txt").read_text() == "2"


def test_what_nobody_knows_is_said(project: Project, other: Project) -> None:
    start(project, other, detach=False)
    unknown = other.run("status", "no-such-run")
    assert unknown.code == 7
    assert "runs --nodes" in unknown.err


def test_a_detached_run_without_launcher_is_not_called_abandoned(project: Project, other: Project) -> None:
    start(project, other)
    record = RunRecord(project.folder / ".dtctl" / "runs" / project.unique)
    launcher = record.info()
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not is_launcher_alive(launcher))
    shown = project.run("status")
    assert "abandoned" not in shown.out
    assert json.loads(project.run("status", "--json").out)["status"] == "running"
    assert "dtctl watch" in shown.out
    assert "abandoned" not in project.run("runs").out
    assert project.run("stop").code == 0
    assert json.loads(project.run("status", "--json").out)["status"] == "stopped"


def test_status_says_nothing_that_only_dtctl_understands(project: Project) -> None:
    workdir = project.folder.parent / "node"
    project.write(
        "dtctl.yaml",
        f'cluster: {{transport: local, workdir: "{workdir}"}}\njob: {{name: test, command: [sleep, "1000"]}}\n',
    )
    assert project.run("launch", "--detach", "--name", project.unique).code == 0
    shown = [project.run("status").out]
    assert project.run("stop").code == 0
    shown.append(project.run("status").out)
    for text in shown:
        assert not re.search(r"pong|abandoned|None|\b0\.0%", text), text
    assert "not measured" in shown[1]
