"""Job arrays on real Slurm: each task is a run, with its own files, its own requeue, its own end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.hosts import Project, wait_until
from tests.integration.slurm_hosts import ask, clean, cluster, fields, hasten, shared, state

__all__ = ["cluster", "shared"]

SPEC = """\
cluster: {{transport: slurm, nodes: 1, slots: 1, python: {python}}}
job: {{name: many, script: train.py, kind: direct}}
slurm: {{requeues: 1, array: "{array}"{more}}}
"""
TELL = """\
import os
for name in ("DTCTL_RUN_ID", "DTCTL_RUN_DIR", "DTCTL_SNAPSHOT_DIR", "DTCTL_METRICS", "DTCTL_ATTEMPT"):
    print(name, os.environ[name], flush=True)
with open("own.txt", "x") as file:  # which the other tasks do not find
    file.write(os.environ["DTCTL_RUN_ID"])
"""
WAIT = """\
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print("ready", os.environ["DTCTL_RUN_ID"], os.environ["DTCTL_ATTEMPT"], flush=True)
if os.environ["SLURM_ARRAY_TASK_ID"] == "{short}":
    sys.exit(0)
time.sleep(1000)
"""


def spec(array: str, more: str = "") -> str:
    return SPEC.format(python=json.dumps(sys.executable), array=array, more=more)


def launched(project: Project) -> list[str]:
    done = project.run("launch", "--name", "many")
    assert done.code == 0, done.err
    return done.out.split()


def status(project: Project, run: str) -> dict[str, object]:
    done = project.run("status", run, "--json")
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def is_over(project: Project, run: str) -> bool:
    return status(project, run)["status"] in ("succeeded", "failed", "stopped")


def job_of(project: Project, run: str) -> str:
    return str(status(project, run)["job"])


def test_each_task_is_a_run_with_its_own_files(shared: Project) -> None:
    shared.write("train.py", TELL)
    shared.write("dtctl.yaml", spec("1-2,5%1"))
    runs = launched(shared)
    assert runs == ["many.1", "many.2", "many.5"]
    folders = set()
    for run in runs:
        wait_until(lambda run=run: is_over(shared, run), 120, f"{run} ends")
        assert status(shared, run)["status"] == "succeeded"
        log = shared.folder / ".dtctl" / "runs" / run / "logs"
        (text,) = [path.read_text() for path in log.glob("*/rank-0.log")]
        told = dict(line.split(" ", 1) for line in text.splitlines())
        assert told["DTCTL_RUN_ID"] == run
        assert told["DTCTL_ATTEMPT"] == "0"
        folder = told["DTCTL_RUN_DIR"]
        assert told["DTCTL_SNAPSHOT_DIR"] == f"{folder.partition('/nodes/')[0]}/snapshots", "of all nodes"
        assert told["DTCTL_METRICS"] == f"{folder}/metrics.jsonl"
        folders.add(folder)
    assert len(folders) == 3
    assert shared.run("fetch", "many.5").code == 0
    fetched = shared.folder / ".dtctl" / "runs" / "many.5" / "outputs" / "slurm"
    assert {path.name: path.read_text() for path in fetched.iterdir()} == {"own.txt": "many.5"}
    listed = json.loads(shared.run("runs", "--json").out)["runs"]
    assert [(each["run"], each["status"]) for each in listed] == [(run, "succeeded") for run in runs]


@pytest.mark.slow
def test_the_last_task_is_requeued_and_warned_alone(shared: Project) -> None:
    """Its SLURM_JOB_ID is the number of the whole array."""
    shared.write("train.py", WAIT.replace("{short}", "1"))
    shared.write("dtctl.yaml", spec("1-3"))
    short, other, last = launched(shared)
    jobs = {run: job_of(shared, run) for run in (short, other, last)}

    def ready(run: str) -> list[str]:
        done = shared.run("logs", run)
        return [line for line in done.out.splitlines() if "ready" in line]

    wait_until(lambda: is_over(shared, short), 60, "the short one ends")
    for run in (other, last):
        wait_until(lambda run=run: status(shared, run)["status"] == "running" and ready(run), 60, f"{run} runs")
    assert fields(shared, jobs[last])["JobId"] == jobs[last].partition("_")[0]
    ask(shared, "scancel", "--signal=USR1", "--batch", jobs[last])
    wait_until(lambda: state(shared, jobs[last]) == "PENDING", 60, "Slurm has the last one again")
    assert state(shared, jobs[other]) == "RUNNING"
    assert state(shared, jobs[short]) in ("COMPLETED", "COMPLETING")
    clean(shared, jobs[last])
    wait_until(lambda: (hasten(shared, jobs[last]), state(shared, jobs[last]))[1] == "RUNNING", 60, "it runs again")
    wait_until(lambda: status(shared, last)["attempt"] == 1, 60, "it is started again")
    assert (status(shared, other)["status"], status(shared, other)["attempt"]) == ("running", 0)
    stopped = shared.run("stop", "many")
    assert stopped.code == 0, stopped.err
    assert {run: status(shared, run)["status"] for run in (short, other, last)} == {
        short: "succeeded", other: "stopped", last: "stopped",
    }  # fmt: skip


def test_one_task_is_stopped_and_the_others_go_on(shared: Project) -> None:
    shared.write("train.py", WAIT.replace("{short}", "none"))
    shared.write("dtctl.yaml", spec("0-2%2"))
    first, second, third = launched(shared)
    for run in (first, second):
        wait_until(lambda run=run: state(shared, job_of(shared, run)) == "RUNNING", 60, f"{run} runs")
    assert status(shared, third)["status"] == "queued"
    done = shared.run("stop", first, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["left_behind"] == 0
    wait_until(lambda: state(shared, job_of(shared, third)) == "RUNNING", 60, "the next one takes its place")
    assert state(shared, job_of(shared, second)) == "RUNNING"


@pytest.mark.parametrize(
    ("more", "where"), [("train: {snapshot: {dir: d}}\n", "snapshot"), ("slurm: {array: 3-1}\n", "array")]
)
def test_what_cannot_be_an_array(shared: Project, more: str, where: str) -> None:
    shared.write("train.py", TELL)
    base = spec("0-1")
    shared.write("dtctl.yaml", base + more if "train" in more else base.replace('"0-1"', "3-1"))
    done = shared.run("launch")
    assert done.code == 4, done.err
    assert where in done.err or "dtctl.yaml:" in done.err


def test_the_other_nodes_look_after_the_first_one_of_each_task(shared: Project, cluster: Sandbox) -> None:
    """srun takes the number of a task's job, and not the name that Slurm has for the task."""
    shared.write("train.py", "import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    shared.write("dtctl.yaml", spec("3-4%1").replace("nodes: 1", "nodes: 2"))
    (run, _) = launched(shared)
    argv = control.enter_argv(cluster, cluster.nodes[1], ["pgrep", "-f", f"guard {job_of(shared, run)} "])
    wait_until(lambda: subprocess.run(argv, capture_output=True, check=False).returncode == 0, 60, "it is looked after")
    assert shared.run("stop", "many").code == 0


def test_a_sweep_is_an_array_in_which_each_task_has_its_settings(shared: Project) -> None:
    shared.write("train.py", "import os, sys\nprint('has', sys.argv[1:], os.environ['SEED'], flush=True)\n")
    shared.write(
        "dtctl.yaml", spec("1").replace(', array: "1"', "").replace("kind: direct", "kind: direct, env: {SEED: 0}")
    )
    sweep = ("--sweep", "job.args=[--lr,1],[--lr,3]", "--sweep", "job.env.SEED=4,5")
    shown = shared.run("launch", *sweep, "--dry-run")
    assert shown.code == 0, shown.err
    assert "#SBATCH --array=1-4" in shown.out
    assert not missing(shown.out, "task 4 [--lr,3] 5")
    done = shared.run("launch", "--name", "many", *sweep)
    assert done.code == 0, done.err
    assert not missing(done.out, "RUN job.args job.env.SEED")
    assert not missing(done.out, "many.4 [--lr,3] 5")
    told = {}
    for run in (f"many.{number}" for number in range(1, 5)):
        wait_until(lambda run=run: is_over(shared, run), 120, f"{run} ends")
        assert status(shared, run)["status"] == "succeeded"
        (text,) = [each.read_text() for each in (shared.folder / ".dtctl/runs" / run / "logs").glob("*/rank-0.log")]
        told[run] = text.strip()
    assert told == {
        "many.1": "has ['--lr', '1'] 4", "many.2": "has ['--lr', '1'] 5",
        "many.3": "has ['--lr', '3'] 4", "many.4": "has ['--lr', '3'] 5",
    }  # fmt: skip
    listed = json.loads(shared.run("runs", "--json").out)["runs"]
    assert [each["sweep"]["job.env.SEED"] for each in listed] == ["4", "5", "4", "5"]


@pytest.mark.parametrize(
    ("key", "code", "where"),
    [("slurm.time=1,2", 4, "array"), ("job.name=a,b", 4, "array"), ("job.max_restarts=1,x", 3, "max_restarts"),
     ("slurm.launcher=none,none", 4, "slurm.launcher")],
)  # fmt: skip
def test_what_one_array_cannot_sweep(shared: Project, key: str, code: int, where: str) -> None:
    shared.write("train.py", TELL)
    shared.write("dtctl.yaml", spec("1").replace(', array: "1"', ""))
    done = shared.run("launch", "--sweep", key)
    assert done.code == code, done.err
    assert where in done.err
    assert not (shared.folder / ".dtctl" / "runs").exists()
