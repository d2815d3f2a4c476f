"""A Slurm cluster that does not answer, is short of nodes, or whose launcher is gone: what is said is what is known."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dtctl.launch.records.events import JobSubmitted, JobSubmitting, RunEnded
from dtctl.launch.records.record import RunRecord, list_run_records
from dtctl.sandbox.layout import Sandbox
from dtctl.slurm.job_watcher import read_job_reference
from tests.facts import missing
from tests.hosts import Project, wait_until
from tests.integration.slurm_hosts import ask, clean, cluster, fields, hasten, shared, state

__all__ = ["cluster", "shared"]

WAIT = "import time\nprint('up', flush=True)\ntime.sleep(300)\n"

DAEMON = """\
import pathlib, subprocess, time
here = pathlib.Path(FOLDER)
subprocess.Popen(["sleep", "301"], start_new_session=True)
while not (here / "go").exists():
    time.sleep(0.1)
"""

HOLDING = """\
#!/bin/sh
# The job's Python, whose first start waits.
if mkdir {here}/reached 2>/dev/null; then
  until [ -e {here}/go ]; do sleep 0.1; done
fi
exec {python} "$@"
"""


def write(
    project: Project, *, nodes: int = 1, script: str = WAIT, python: str = sys.executable, job: str = "", more: str = ""
) -> None:
    project.write("train.py", script)
    project.write(
        "dtctl.yaml",
        f"cluster: {{transport: slurm, nodes: {nodes}, slots: 1, python: {json.dumps(python)}}}\n"
        f"job: {{name: test, script: train.py, kind: direct{job}}}\n{more}",
    )


def record(project: Project) -> RunRecord:
    return list_run_records(project.folder)[-1]


def scontrol(project: Project, *words: str) -> None:
    ask(project, "scontrol", *words)


@contextmanager
def silent_controller(cluster: Sandbox) -> Iterator[None]:
    """slurmctld does not run for a while."""
    pid = int((cluster.state / "slurm" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_job_for_drained_nodes_is_queued(shared: Project) -> None:
    """As sbatch does: somebody will repair them. Doctor and launch say the same."""
    write(shared, nodes=2, script="print('ran', flush=True)\n")
    scontrol(shared, "update", "nodename=node2", "state=drain", "reason=test")
    try:
        doctor = shared.run("doctor", "--json")
        launched = shared.run("launch", "--detach")
        finding = next(each for each in json.loads(doctor.out)["findings"] if each["check"] == "job-nodes")
        assert (doctor.code, finding["status"], finding["nodes"]) == (0, "warn", ["node2"])
        assert launched.code == 0, launched.err
        assert "node2" in launched.err
        job = read_job_reference(record(shared)).job
        assert state(shared, job) == "PENDING"
    finally:
        scontrol(shared, "update", "nodename=node2", "state=resume")
    wait_until(lambda: state(shared, job) == "COMPLETED", 90, "it runs when the node is back")


def test_stop_says_what_is_known_when_the_controller_is_down(shared: Project, cluster: Sandbox) -> None:
    write(shared)
    assert shared.run("launch", "--detach").code == 0
    job = read_job_reference(record(shared)).job
    # Not only Slurm's word for it: srun, which starts the workers, asks the controller, and gives up without an answer.
    logs = lambda: (shared.folder / ".dtctl" / "slurm").rglob("rank-0.log")  # noqa: E731
    wait_until(lambda: any("up" in log.read_text() for log in logs()), 60, "its worker runs")
    with silent_controller(cluster):  # for as long as the command takes, so one that waits for it does not end
        done = shared.run("stop")
    assert done.code == 7, done.out
    assert job in done.err
    assert "0 processes" not in done.out + done.err
    wait_until(lambda: state(shared, job) == "RUNNING", 60, "the controller is back, and the job was left alone")
    assert shared.run("stop").code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "more"),
    [("", ""), (", max_restarts: 1, recovery: live", "train: {strategy: ddp}\n")],
    ids=["srun", "live"],
)
def test_a_job_waits_for_a_controller_that_is_silent_when_its_workers_are_to_start(
    shared: Project, cluster: Sandbox, keys: str, more: str
) -> None:
    """A restart of slurmctld at this moment is no failure of the job; srun alone would give up."""
    here = shared.folder
    python = here / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(HOLDING.format(here=here, python=sys.executable))
    python.chmod(0o755)
    write(shared, nodes=2, script="print('ran', flush=True)\n", python=str(python), job=keys, more=more)
    launched = shared.run("launch", "--detach")
    assert launched.code == 0, launched.err
    job = read_job_reference(record(shared)).job
    wait_until((here / "reached").exists, 60, "the batch script has begun")
    log = lambda: "".join(one.read_text() for one in (here / ".dtctl" / "slurm").rglob("job.log"))  # noqa: E731
    with silent_controller(cluster):
        (here / "go").touch()
        wait_until(lambda: "srun" in log() or "waiting for Slurm's controller" in log(), 60, "it asks the controller")
    wait_until(lambda: state(shared, job) in ("COMPLETED", "FAILED"), 90, "it is over")
    assert state(shared, job) == "COMPLETED", log()
    assert "waiting for Slurm's controller" in log()


def test_the_terminal_goes_and_the_job_stays(shared: Project) -> None:
    write(shared)
    launcher = shared.start("launch")
    wait_until(
        lambda: any(
            isinstance(event, JobSubmitted) for run in list_run_records(shared.folder) for event in run.events()
        ),
        60,
    )
    job = read_job_reference(record(shared)).job
    wait_until(lambda: state(shared, job) == "RUNNING", 60, "it runs")
    launcher.send_signal(signal.SIGHUP)
    assert launcher.wait(timeout=600) == 128 + signal.SIGHUP
    assert state(shared, job) == "RUNNING"
    # Slurm is asked seldom, so that a job may run for a moment before anybody knows.
    wait_until(lambda: json.loads(shared.run("status", "--json").out)["status"] == "running", 20, "that is known")
    assert shared.run("stop").code == 0


def without_the_answer(project: Project) -> None:
    """The records as a launcher leaves them that was killed between its question to Slurm and the answer."""
    path = record(project).folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kept = next(at for at, line in enumerate(lines) if '"submitting"' in line) + 1
    path.write_text("".join(lines[:kept]))


@pytest.mark.parametrize("command", ["status", "stop"])
def test_a_job_that_no_launcher_knows_is_found(shared: Project, command: str) -> None:
    write(shared)
    assert shared.run("launch", "--detach").code == 0
    job = read_job_reference(record(shared)).job
    assert isinstance(list(record(shared).events())[1], JobSubmitting)
    without_the_answer(shared)
    done = shared.run(command)
    assert done.code == 0, done.err
    assert read_job_reference(record(shared)).job == job
    if command == "stop":
        assert state(shared, job) == "CANCELLED"
    else:
        shared.run("stop")


@pytest.mark.slow
def test_a_submission_that_never_was_is_over(shared: Project) -> None:
    """The launcher was killed before it had asked Slurm."""
    write(shared)
    assert shared.run("launch", "--detach").code == 0
    job = read_job_reference(record(shared)).job
    shared.run("stop")
    without_the_answer(shared)
    path = record(shared).folder / "events.jsonl"
    path.write_text(path.read_text().replace("job.sbatch", "other.sbatch"))
    for log in (shared.folder / ".dtctl" / "slurm").glob("*/job.log"):  # none if it was ended before it began
        log.unlink()
    assert fields(shared, job)
    done = shared.run("stop", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["left_behind"] == 0, done.err
    assert isinstance(list(record(shared).events())[-1], RunEnded)


SHIM = """\
#!/bin/sh
# Before, or behind, the real command: ends the launcher, and what it has started to talk with Slurm.
end() {{
  agent=$PPID
  launcher=$(ps -o ppid= "$agent")
  touch {folder}/done-{moment}
  kill -KILL "$launcher"
  kill -KILL "$agent"
}}
case {moment}.$1 in
  offer.show | test.--test-only | during.--parsable) [ -e {folder}/done-{moment} ] || end ;;
esac
{real} "$@"
code=$?
[ {moment}.$1 != after.--parsable ] || end
exit $code
"""


@pytest.mark.parametrize(
    ("moment", "submitted"),
    [
        ("offer", False),  # the intent is not written yet
        # It is, and Slurm was asked whether it would take the job.
        pytest.param("test", False, marks=pytest.mark.slow),
        ("during", True),  # sbatch itself is not stopped
        ("after", True),  # Slurm has the job, and nobody has noted its number
    ],
)
def test_a_launcher_that_is_killed_around_the_submission_leaves_no_unknown_job(
    shared: Project, moment: str, submitted: bool
) -> None:
    write(shared)
    folder = shared.folder / "shims"
    folder.mkdir()
    for name in ("sbatch", "scontrol"):
        shim = SHIM.format(folder=folder, moment=moment, real=shutil.which(name))
        (folder / name).write_text(shim)
        (folder / name).chmod(0o755)
    killed = shared.run("launch", env={"PATH": f"{folder}:{shared.env['PATH']}"})
    assert killed.code == -signal.SIGKILL, killed.err
    if submitted:
        wait_until(lambda: jobs_of(shared), 60, "Slurm has the job")
    status = json.loads(shared.run("status", "--json").out)
    assert status["status"] in (("queued", "starting", "running") if submitted else ("failed",)), status
    (row,) = json.loads(shared.run("runs", "--json").out)["runs"]
    assert ([row["job"]] if submitted else []) == jobs_of(shared)
    stopped = shared.run("stop", "--json")
    assert stopped.code == 0, stopped.err
    assert json.loads(stopped.out)["left_behind"] == 0, stopped.err
    assert jobs_of(shared) == []


def jobs_of(project: Project) -> list[str]:
    """Jobs of this project that Slurm has and that are not over."""
    listed = ask(project, "squeue", "--noheader", "--format=%i %Z")
    return [line.split()[0] for line in listed.splitlines() if str(project.folder) in line]


def test_a_job_looks_for_itself_what_it_has_left(shared: Project) -> None:
    """Another job has the nodes as soon as it ends, so that nobody could look afterwards."""
    write(shared, nodes=2, script=DAEMON.replace("FOLDER", repr(str(shared.folder))))
    launcher = shared.start("launch", "--json")
    wait_until(
        lambda: (
            list_run_records(shared.folder)
            and any(isinstance(event, JobSubmitted) for event in record(shared).events())
        )
    )
    argv = ["sbatch", "--parsable", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap", "sleep 60"]
    other = subprocess.run(argv, env=shared.env, capture_output=True, text=True, check=True).stdout.strip()
    (shared.folder / "go").touch()
    done = shared.finish(launcher)
    assert done.code == 0, done.err
    assert done.done["left_behind"] == 0
    wait_until(lambda: state(shared, other) == "RUNNING", 60, "the other job has the nodes")
    told = {event["node"]: event["left"] for event in done.events if event.get("state") == "stopped"}
    assert told == {"node1": 0, "node2": 0}


@pytest.mark.parametrize("wrong", ["python", "folder"])
def test_what_kept_the_workers_from_starting_is_named(shared: Project, wrong: str) -> None:
    write(shared)
    if wrong == "python":
        text = (shared.folder / "dtctl.yaml").read_text()
        shared.write("dtctl.yaml", text.replace(json.dumps(sys.executable), "/nowhere/python"))
        done = shared.run("launch", "--json")
    else:
        argv = ["sbatch", "--parsable", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap", "sleep 600"]
        blocker = subprocess.run(argv, env=shared.env, capture_output=True, text=True, check=True).stdout.strip()
        wait_until(lambda: state(shared, blocker) == "RUNNING", 60, "the nodes are taken")
        launcher = shared.start("launch", "--json")
        wait_until(
            lambda: (
                list_run_records(shared.folder) and any(isinstance(e, JobSubmitted) for e in record(shared).events())
            )
        )
        folder = next(path for path in (shared.folder / ".dtctl" / "slurm").iterdir())
        (folder / "control").touch()  # no folder can be made there, by root neither
        ask(shared, "scancel", blocker)
        done = shared.finish(launcher)
    assert done.code == 8, done.err
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert ("/nowhere/python" if wrong == "python" else "cannot be written") in failure["summary"], failure


def test_a_job_that_can_never_start_does_not_wait_for_ever(shared: Project) -> None:
    argv = ["sbatch", "--parsable", "--output=/dev/null", "--wrap", "exit 1"]
    failed = subprocess.run(argv, env=shared.env, capture_output=True, text=True, check=True).stdout.strip()
    wait_until(lambda: state(shared, failed) == "FAILED", 60, "what it depends on has failed")
    write(shared)
    spec = shared.folder / "dtctl.yaml"
    spec.write_text(f"{spec.read_text()}slurm: {{extra: {{dependency: 'afterok:{failed}'}}}}\n")
    done = shared.run("launch", "--json")
    assert done.code == 8, done.err
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert not missing(str(failure["summary"]), "DependencyNeverSatisfied slurm.extra")
    assert state(shared, read_job_reference(record(shared)).job) == "CANCELLED"


def begun(project: Project, workers: int) -> subprocess.Popen[str]:
    """A launcher whose workers have all printed their first word."""
    launcher = project.start("launch", "--json")
    logs = lambda: project.folder.glob(".dtctl/runs/*/logs/*/rank-*.log")  # noqa: E731
    wait_until(lambda: sum("up" in log.read_text() for log in logs()) == workers, 60, "it runs")
    return launcher


def test_what_others_do_to_a_job_is_told(shared: Project) -> None:
    """Requeued and held by somebody, released, and cancelled by scancel."""
    write(shared)
    launcher = begun(shared, 1)
    job = read_job_reference(record(shared)).job
    scontrol(shared, "requeuehold", job)
    wait_until(lambda: f"scontrol release {job}" in shared.run("status").out, 60, "it is held, and told so")
    scontrol(shared, "release", job)
    clean(shared, job)
    hasten(shared, job)
    wait_until(lambda: state(shared, job) == "RUNNING", 60, "it runs again")
    wait_until(lambda: '"restart"' in (record(shared).folder / "events.jsonl").read_text(), 60, "that is seen")
    ask(shared, "scancel", job)
    done = shared.finish(launcher)
    (restart,) = [event for event in done.events if event["event"] == "restart"]
    assert "requeue" in str(restart["reason"])
    assert (done.code, done.done["status"], done.done["first_failure"]) == (143, "stopped", None)
    assert any("scancel" in str(event["text"]) for event in done.events if event["event"] == "note")


@pytest.mark.slow
def test_a_stopped_slurmd_is_a_lost_node(shared: Project, cluster: Sandbox) -> None:
    write(shared, nodes=2)
    launcher = begun(shared, 2)
    job = read_job_reference(record(shared)).job
    argv = ["pgrep", "-f", f"slurmd -D -N node2 -f {cluster.state}"]
    daemons = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    for daemon in daemons:
        os.kill(int(daemon), signal.SIGSTOP)
    try:
        events = record(shared).folder / "events.jsonl"
        wait_until(lambda: "Node failure on node2" in events.read_text(), 120, "Slurm has given the node up")
        wait_until(lambda: state(shared, job) == "PENDING", 60, "it is requeued")
    finally:
        for daemon in daemons:
            os.kill(int(daemon), signal.SIGCONT)
    clean(shared, job)
    hasten(shared, job)
    wait_until(lambda: '"restart"' in events.read_text(), 120, "it is started again")
    launcher.send_signal(signal.SIGINT)
    done = shared.finish(launcher)
    (restart,) = [event for event in done.events if event["event"] == "restart"]
    assert (restart["reason"], restart["node"], restart["rank"]) == ("a node failed", "node2", None)
