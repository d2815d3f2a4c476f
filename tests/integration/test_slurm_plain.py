"""Plain mode on real Slurm: srun alone starts the workers, by `sbatch` and by `dtctl launch`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.hosts import Project, wait_until
from tests.integration.slurm_hosts import ask, clean, cluster, fields, hasten, shared, state
from tests.integration.test_sbatch import SPEC as TOLD_SPEC
from tests.integration.test_sbatch import TELL, WAIT, told
from tests.integration.test_slurm_launch import job_of, processes, record, training

__all__ = ["cluster", "shared"]

SPEC = """\
cluster: {{transport: slurm, nodes: 2, slots: 2, python: {python}}}
job: {{name: test, script: train.py, kind: {kind}{job}}}
slurm: {{launcher: none{slurm}}}
"""
GATHER = """\
import os, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(total)
print("sum", total.item(), "at", os.environ["MASTER_ADDR"], flush=True)
dist.destroy_process_group()
"""
KINDS = pytest.mark.parametrize("kind", ["direct", "torchrun"])


def spec(kind: str = "direct", *, job: str = "", slurm: str = "") -> str:
    return SPEC.format(python=json.dumps(sys.executable), kind=kind, job=job, slurm=slurm)


def notes(events: list[dict[str, object]]) -> list[object]:
    return [event["text"] for event in events if event["event"] == "note"]


def submitted(project: Project, *options: str) -> tuple[str, Path]:
    """The job of a file that was written by dtctl and submitted by hand, and its output."""
    assert project.run("sbatch", "--plain", "--out", "job.sbatch", env={"KEY": "secret"}).code == 0
    argv = ["sbatch", "--parsable", "--output=job.log", *options, "job.sbatch"]
    done = subprocess.run(argv, cwd=project.folder, env=project.env, capture_output=True, text=True, check=True)
    return done.stdout.strip(), project.folder / "job.log"


@KINDS
def test_the_workers_of_a_file_are_those_of_a_launch(shared: Project, kind: str) -> None:
    program = f"kind: {kind}\n  script: tell.py"
    python = f"slots: 2, python: {json.dumps(sys.executable)}"
    shared.write("tell.py", TELL)
    shared.write("dtctl.yaml", TOLD_SPEC.format(transport="slurm", program=program).replace("slots: 2", python))
    job, log = submitted(shared)
    wait_until(lambda: state(shared, job) in ("COMPLETED", "FAILED"), 60, "the job ends")
    by_slurm = told(log.read_text())
    shared.write("dtctl.yaml", TOLD_SPEC.format(transport="sandbox", program=program))
    launched = shared.run("launch")
    assert launched.code == 0, launched.err
    assert sorted(by_slurm) == ["0", "1", "2", "3"], log.read_text()
    assert by_slurm == told(launched.out + launched.err)


@pytest.mark.torch
@KINDS
def test_a_launch_is_followed_to_its_end(shared: Project, cluster: Sandbox, kind: str) -> None:
    shared.write("dtctl.yaml", spec(kind, job=", max_restarts: 3, hang_s: 60"))
    shared.write("train.py", GATHER)
    done = shared.run("launch", "--json")
    assert done.code == 0, done.err
    assert (done.done["status"], done.done["attempts"], done.done["left_behind"]) == ("succeeded", 1, 0)
    addresses = {node.address for node in cluster.nodes}
    for rank in range(4):
        text = record(shared).log_path(f"node{1 + rank // 2}", rank).read_text()
        (line,) = [line for line in text.splitlines() if line.startswith("sum ")]
        assert line.startswith("sum 6.0 at "), line
        assert line.removeprefix("sum 6.0 at ") in addresses
    said = json.loads(shared.run("status", "--json").out)
    assert (said["status"], said["nodes"]) == ("succeeded", {"node1": "stopped", "node2": "stopped"})
    assert shared.run("logs").out.count("sum 6.0") == 4
    told_notes = "\n".join(map(str, notes(done.events)))
    assert not missing(told_notes, "slurm.launcher none hang restarts")
    assert not missing(told_notes, "job.hang_s job.max_restarts effect launcher")


@pytest.fixture
def hosts_files(cluster: Sandbox) -> Iterator[list[Path]]:
    """What the nodes know names from."""
    paths = [cluster.state / "hosts" / node.name / "etc" / "hosts" for node in cluster.nodes]
    kept = [path.read_text() for path in paths]
    yield paths
    for path, text in zip(paths, kept, strict=True):
        path.write_text(text)


@pytest.mark.torch
@pytest.mark.parametrize("names", ["", "127.0.1.1 node1 node2\n"], ids=["unknown", "loopback"])
@KINDS
def test_workers_meet_where_names_of_nodes_lead_nowhere(
    shared: Project, cluster: Sandbox, hosts_files: list[Path], names: str, kind: str
) -> None:
    for path in hosts_files:
        path.write_text(f"127.0.0.1 localhost\n{names}")
    shared.write("dtctl.yaml", spec(kind))
    shared.write("train.py", GATHER)
    done = shared.run("launch", "--json")
    assert done.code == 0, done.err
    found = {line.partition("sum 6.0 at ")[2] for line in done.err.splitlines() if "sum 6.0" in line}
    assert len(found) == 1, done.out
    assert found < {node.address for node in cluster.nodes}


@KINDS
def test_a_worker_that_fails_ends_the_run(shared: Project, kind: str) -> None:
    shared.write("dtctl.yaml", spec(kind, job=", max_restarts: 3"))
    shared.write(
        "train.py",
        "import os, time\nif os.environ['RANK'] == '3': raise ValueError('rank 3 has had enough')\ntime.sleep(1000)\n",
    )
    done = shared.run("launch", "--json")
    assert done.code == 8, done.err
    assert (done.done["attempts"], done.done["left_behind"]) == (1, 0)
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert (failure["node"], failure["rank"], failure["exit_code"]) == ("node2", 3, 1), done.err
    assert failure["summary"] == "ValueError: rank 3 has had enough"
    assert failure["log"].endswith("node2/rank-3.log")


def test_a_set_up_that_ends_the_script_is_a_failure(shared: Project) -> None:
    shared.write("dtctl.yaml", spec(job=", setup: ['true', exit 0]"))
    shared.write("train.py", "print('workers began')\n")
    done = shared.run("launch", "--json")
    assert done.code == 8, done.err
    assert not missing(done.err, "job.setup exit 0")
    assert "workers began" not in shared.printed(record(shared).run)


def test_a_secret_that_the_job_lacks_is_named(shared: Project) -> None:
    shared.write("dtctl.yaml", spec(job=", secrets: [KEY]"))
    shared.write("train.py", "print('workers began')\n")
    job, log = submitted(shared, "--export=NONE")
    assert "secret" not in (shared.folder / "job.sbatch").read_text()
    wait_until(lambda: state(shared, job) == "FAILED", 60, "it fails")
    assert not missing(log.read_text(), "KEY sbatch --export")
    assert fields(shared, job)["ExitCode"] == "78:0"


def test_every_task_of_an_array_has_its_own_folder(shared: Project) -> None:
    shared.write("dtctl.yaml", spec(slurm=', array: "3-4"'))
    script = "import os\nopen('own-' + os.environ['RANK'], 'x').close()\nprint(os.environ['DTCTL_RUN_ID'])\n"
    shared.write("train.py", script)
    done = shared.run("launch", "--name", "many")
    assert (done.code, done.out.split()) == (0, ["many.3", "many.4"]), done.err

    def status(run: str) -> str:
        return str(json.loads(shared.run("status", run, "--json").out)["status"])

    for run in ("many.3", "many.4"):
        wait_until(lambda run=run: status(run) in ("succeeded", "failed"), 60, f"{run} ends")
        assert status(run) == "succeeded"
        assert shared.printed(run).split() == [run] * 4


def test_stop_ends_a_job_and_leaves_nothing(shared: Project, cluster: Sandbox) -> None:
    shared.write("dtctl.yaml", spec("torchrun"))
    shared.write("train.py", "import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    assert shared.run("launch", "--detach").code == 0
    wait_until(lambda: shared.run("logs").out.count("up\n") == 4, 60, "it runs")
    assert json.loads(shared.run("status", "--json").out)["status"] == "running"
    inside = shared.run("exec", record(shared).run, "node2", "--", "echo $DTCTL_NODE")
    assert (inside.code, inside.out) == (0, "node2\n"), inside.err
    stopped = shared.run("stop", "--json")
    assert (stopped.code, json.loads(stopped.out)["left_behind"]) == (0, 0), stopped.err
    assert processes(cluster) == ""
    assert json.loads(shared.run("status", "--json").out)["status"] == "stopped"


def test_workers_are_warned_and_the_job_goes_on_within_its_budget(shared: Project) -> None:
    shared.write("dtctl.yaml", spec(slurm=", requeues: 1"))
    shared.write("train.py", WAIT)
    job, log = submitted(shared)
    for start, ends in enumerate(("PENDING", "FAILED")):
        ready = f"start {start} ready"
        wait_until(lambda ready=ready: log.exists() and log.read_text().count(ready) == 4, 60, f"start {start}")
        ask(shared, "scancel", "--signal=USR1", "--batch", job)
        wait_until(lambda ends=ends: state(shared, job) == ends, 60, "Slurm has it again, or not")
        if ends == "PENDING":
            clean(shared, job)
            hasten(shared, job)
    assert log.read_text().count("dtctl: to be started again") == 1


@pytest.mark.slow
@pytest.mark.torch
def test_a_training_that_is_warned_ends_with_the_same_bits(shared: Project) -> None:
    """Followed through the requeue."""
    alone, warned = (
        training(shared.folder, shared.env, name, more=", launcher: none") for name in ("alone", "time limit")
    )
    try:
        alone.launch()
        alone.finish()
        warned.launch()
        wait_until(warned.trains, 90, "it trains")
        ask(shared, "scancel", "--signal=USR1", "--batch", job_of(warned.project))
        wait_until(warned.is_started_again, 120, "Slurm has started it again")
        warned.finish()
        assert warned.done is not None
        restarts = [event["reason"] for event in warned.done.events if event["event"] == "restart"]
        assert (restarts, warned.done.done["attempts"]) == (["its time limit was near"], 2)
        assert warned.read_digest() == alone.read_digest()
    finally:
        alone.project.close()
        warned.project.close()
