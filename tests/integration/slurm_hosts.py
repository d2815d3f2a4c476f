"""A Slurm cluster of virtual hosts for a module's tests, and projects in a folder that all of them see."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.sandbox import control, slurm
from dtctl.sandbox.layout import Sandbox
from tests.hosts import Project, wait_until

NO_ANSWER = re.compile(r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted")


@pytest.fixture(scope="module")
def cluster(sandbox_env: dict[str, str]) -> Iterator[Sandbox]:
    sandbox = control.start_sandbox(f"slurm-{secrets.token_hex(3)}", nodes=2, with_slurm=True)
    yield sandbox
    control.remove_sandbox(sandbox.name)


@pytest.fixture
def shared(sandbox_env: dict[str, str], cluster: Sandbox) -> Iterator[Project]:
    """A project in a folder that all hosts see."""
    folder = Path(os.environ["DTCTL_SANDBOX_DIR"]) / f"shared-{secrets.token_hex(3)}"
    folder.mkdir()
    env = {
        **sandbox_env,
        **slurm.build_slurm_environment(cluster),
        "DTCTL_SANDBOX": cluster.name,
        "PATH": python_path(),
    }
    project = Project(folder, dict(env))
    yield project
    project.close()
    ask(project, "scancel", "--user=root")  # what a failed test leaves
    wait_until(lambda: not ask(project, "squeue", "--noheader", "--user=root").strip(), what="no job writes any more")
    shutil.rmtree(folder)


def python_path() -> str:
    """PATH with this Python first, as after `module load`."""
    return f"{Path(shutil.which('python3') or '').parent}:{os.environ['PATH']}"


def ask(project: Project, *argv: str) -> str:
    """The output of one of Slurm's commands that does the same when it runs twice, as `scontrol show` and `scancel`.

    A controller on a busy machine may not answer in the time that these commands give it.
    """
    done = subprocess.run(argv, env=project.env, capture_output=True, text=True, check=False)

    def answers() -> bool:
        nonlocal done
        if done.returncode and NO_ANSWER.search(done.stderr):
            done = subprocess.run(argv, env=project.env, capture_output=True, text=True, check=False)
            return not NO_ANSWER.search(done.stderr)
        return True

    wait_until(answers, 120, "Slurm's controller answers")
    assert done.returncode == 0, (argv, done.stdout, done.stderr)
    return done.stdout


def fields(project: Project, job: str) -> dict[str, str]:
    """What the controller says of a job."""
    return dict(re.findall(r"(\w+)=(\S*)", ask(project, "scontrol", "show", "job", "-o", job)))


def state(project: Project, job: str) -> str:
    return fields(project, job)["JobState"]


def is_clean(project: Project, job: str) -> bool:
    """Whether the nodes of a job that was requeued are clean: one that begins before that fails at once."""
    taken = time.mktime(time.strptime(fields(project, job)["SubmitTime"], "%Y-%m-%dT%H:%M:%S"))
    return time.time() - taken > 8


def clean(project: Project, job: str) -> None:
    """Wait until they are."""
    wait_until(lambda: is_clean(project, job), 20, "its nodes are clean")


def hasten(project: Project, job: str) -> None:
    """Have a requeued job start now; Slurm itself would let it wait for two minutes."""
    subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], env=project.env, check=False)
