"""Runs that an older version has launched are read, followed and stopped by this one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from dtctl.launch.records.record import list_run_records
from dtctl.sandbox.layout import Sandbox
from tests.hosts import LIMIT_S, Project, wait_until
from tests.integration.slurm_hosts import cluster, shared

__all__ = ["cluster", "shared"]

pytestmark = pytest.mark.slow
OLDER: Final = "f388d14"
"""The last version whose jobs of Slurm had a launcher of their own, written in bash."""
ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = "import os, time\nprint('rank', os.environ['RANK'], 'is up', flush=True)\ntime.sleep({seconds})\n"
SPEC: Final = """\
cluster: {{transport: {transport}, nodes: 2, slots: 1, python: {python}}}
job: {{name: old, script: train.py, kind: direct, grace_s: 1}}
"""
Older = Callable[..., None]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Older:
    """A command of the older version in a project."""
    packed = subprocess.run(["git", "archive", OLDER, "dtctl", "templates"], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"git has no {OLDER} here: {packed.stderr.decode(errors='replace').strip()}")
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")

    def run(project: Project, *arguments: str) -> None:
        env = {**project.env, "PYTHONPATH": str(folder)}
        argv = [sys.executable, "-m", "dtctl", *arguments]
        done = subprocess.run(
            argv, cwd=project.folder, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stderr

    return run


def write(project: Project, transport: str, *, seconds: float) -> None:
    project.write("dtctl.yaml", SPEC.format(transport=transport, python=json.dumps(sys.executable)))
    project.write("train.py", SCRIPT.format(seconds=seconds))


def check_ended(project: Project) -> None:
    """Read a run that has ended."""
    (run,) = [record.run for record in list_run_records(project.folder)]
    assert run in project.run("runs").out
    told = json.loads(project.run("status", run, "--json").out)
    assert (told["status"], told["done"]["exit_code"], told["done"]["left_behind"]) == ("succeeded", 0, 0)
    assert project.run("logs", run).out.count(" is up") == 2
    page = project.run("report", run, "-o", "page.html")
    assert page.code == 0, page.err
    assert run in (project.folder / "page.html").read_text()


def check_running(project: Project) -> None:
    """Follow a run that is under way, and stop it."""
    (run,) = [record.run for record in list_run_records(project.folder)]
    wait_until(lambda: project.run("logs", run).out.count(" is up") == 2, what="the workers have printed")
    told = json.loads(project.run("status", run, "--json").out)
    assert told["status"] == "running"
    stopped = project.run("stop", run, "--json")
    assert (stopped.code, json.loads(stopped.out)["left_behind"]) == (0, 0), stopped.err
    told = json.loads(project.run("status", run, "--json").out)
    assert told["status"] == "stopped"


def test_a_run_over_ssh_is_read(project: Project, sandbox: Sandbox, older: Older) -> None:
    write(project, "sandbox", seconds=0.5)
    older(project, "launch")
    check_ended(project)


def test_a_running_run_over_ssh_is_stopped(project: Project, sandbox: Sandbox, older: Older) -> None:
    write(project, "sandbox", seconds=1000)
    older(project, "launch", "--detach")
    check_running(project)


def test_a_job_is_read(shared: Project, older: Older) -> None:
    write(shared, "slurm", seconds=0.5)
    older(shared, "launch")
    (batch,) = shared.folder.glob(".dtctl/slurm/*/job.sbatch")
    assert len(batch.read_text().splitlines()) > 300, "it is the older version's"
    check_ended(shared)


def test_a_running_job_is_stopped(shared: Project, older: Older) -> None:
    write(shared, "slurm", seconds=1000)
    older(shared, "launch", "--detach")
    check_running(shared)
