"""Real Slurm on virtual hosts: it takes jobs, loses a node, and goes without a trace."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl import node_facts
from dtctl.errors import SandboxError
from dtctl.sandbox import control, faults, slurm
from dtctl.sandbox.layout import Sandbox
from tests.facts import raises
from tests.hosts import wait_until


@pytest.fixture
def cluster(sandbox_env: dict[str, str]) -> Iterator[Sandbox]:
    """Two hosts that are a Slurm cluster, of a test's own."""
    sandbox = control.start_sandbox(f"slurm-{secrets.token_hex(3)}", nodes=2, with_slurm=True)
    yield sandbox
    control.remove_sandbox(sandbox.name)


@pytest.fixture
def shared(sandbox_env: dict[str, str]) -> Iterator[Path]:
    """A folder that all hosts see, as a cluster's file system."""
    folder = Path(os.environ["DTCTL_SANDBOX_DIR"]) / f"shared-{secrets.token_hex(3)}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def said(sandbox: Sandbox, *argv: str, cwd: Path) -> str:
    """Output of one of Slurm's commands, run on this machine."""
    environ = {**os.environ, **slurm.build_slurm_environment(sandbox)}
    done = subprocess.run(argv, cwd=cwd, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_runs_on_all_nodes(cluster: Sandbox, shared: Path) -> None:
    assert sorted(said(cluster, "srun", "--nodes=2", "hostname", cwd=shared).split()) == ["node1", "node2"]
    (shared / "job.sh").write_text('#!/bin/bash\necho "first on $(hostname)"\nsrun --label hostname\n')
    said(cluster, "sbatch", "--wait", "--nodes=2", "--output=out", "job.sh", cwd=shared)
    assert sorted((shared / "out").read_text().splitlines()) == ["0: node1", "1: node2", "first on node1"]


def test_whoever_logs_in_finds_the_commands(cluster: Sandbox, shared: Path) -> None:
    options = ["-F", "none", "-i", str(cluster.identity_file), "-o", f"UserKnownHostsFile={cluster.known_hosts}"]
    place = f"{cluster.user}@{cluster.nodes[1].address}"
    argv = ["ssh", *options, place, "sinfo --noheader --Node --format %N"]
    done = subprocess.run(argv, cwd=shared, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == {"node1", "node2"}, done.stderr


def test_a_node_that_was_off_takes_jobs_again(cluster: Sandbox, shared: Path) -> None:
    faults.power_off_host(cluster, cluster.nodes[1])
    faults.remove_host_faults(cluster, cluster.nodes)
    slurm.wait_ready(cluster)
    assert sorted(said(cluster, "srun", "--nodes=2", "hostname", cwd=shared).split()) == ["node1", "node2"]


def test_nothing_is_left(sandbox_env: dict[str, str], shared: Path) -> None:
    sandbox = control.start_sandbox(f"slurm-{secrets.token_hex(3)}", nodes=1, with_slurm=True)
    said(sandbox, "sbatch", "--output=none", "--wrap", "sleep 60", cwd=shared)
    wait_until(lambda: said(sandbox, "squeue", "--noheader", "--format=%T", cwd=shared).strip() == "RUNNING")
    folder = os.fsencode(sandbox.state)
    control.remove_sandbox(sandbox.name)

    def left() -> list[str]:
        lines = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
        return [pid for pid, line in lines.items() if folder in line and node_facts.start_ticks(int(pid))]

    wait_until(lambda: not left(), what="no process of it is left")
    assert not sandbox.state.exists()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "PATH", "/nowhere")
    with raises(SandboxError, "munge slurm-client slurmctld slurmd"):
        slurm.check_slurm_requirements()
