"""Inside a job of Slurm a lost worker, or node, is replaced while the others stay, and nobody has to follow it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.launch.records.events import WorkerExited, WorkersReplaced
from dtctl.launch.records.record import RunRecord, list_run_records
from dtctl.sandbox import control, faults, slurm
from dtctl.sandbox.layout import Sandbox
from dtctl.slurm.job_state import RUNNING, WAITING
from dtctl.slurm.job_watcher import read_job_reference
from tests.hosts import Project, wait_until
from tests.integration import test_live
from tests.integration.slurm_hosts import python_path, state

pytestmark = pytest.mark.torch

SPEC = """\
cluster: {{transport: slurm, nodes: 2, spares: {spares}, slots: 1, python: {python}}}
job:
  {{name: live, script: train.py, kind: direct, grace_s: 1, max_restarts: 1, recovery: {recovery}, heal_s: {heal_s},
    hang_s: 600, env: {{OMP_NUM_THREADS: "1", PYTHONPATH: "{here}", KILL: "{kill}", KEEPS: ""}}}}
train:
  {{strategy: ddp, steps: 16, micro_batch: 2, accumulate: 2, clip_norm: 1.0, data_workers: 1, log_every: 4,
    eval_every: 8, timeout_s: 600, snapshot: {{every_steps: 6}}}}
"""


@pytest.fixture(scope="module")
def cluster(sandbox_env: dict[str, str]) -> Iterator[Sandbox]:
    sandbox = control.start_sandbox(f"slurm-{secrets.token_hex(3)}", nodes=3, with_slurm=True)
    yield sandbox
    control.remove_sandbox(sandbox.name)


@pytest.fixture(scope="module")
def base(cluster: Sandbox) -> Iterator[Path]:
    """A folder that all hosts see."""
    folder = Path(os.environ["DTCTL_SANDBOX_DIR"]) / f"live-{secrets.token_hex(3)}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def project(
    base: Path,
    env: dict[str, str],
    cluster: Sandbox,
    name: str,
    *,
    kill: str,
    spare: bool = False,
    live: bool = True,
    heal_s: float = 600,
) -> Project:
    folder = base / name
    folder.mkdir()
    made = Project(
        folder, {**env, **slurm.build_slurm_environment(cluster), "DTCTL_SANDBOX": cluster.name, "PATH": python_path()}
    )
    made.write("train.py", test_live.TRAIN)
    spec = SPEC.format(
        spares="[spare]" if spare else "[]", python=json.dumps(sys.executable), here=test_live.HERE, kill=kill,
        recovery="live" if live else "restart", heal_s=heal_s,
    )  # fmt: skip
    made.write("dtctl.yaml", spec)
    return made


def record(project: Project) -> RunRecord:
    return list_run_records(project.folder)[-1]


def digest(project: Project) -> object:
    found = json.loads(project.run("snapshot", "digest", "--json").out)
    assert found["step"] == 16
    return found["digest"]


@pytest.fixture(scope="module")
def straight(base: Path, sandbox_env: dict[str, str], cluster: Sandbox) -> object:
    """What a run ends with that was left alone, its workers started by srun."""
    alone = project(base, sandbox_env, cluster, "alone", kill="", live=False)
    done = alone.run("launch", "--json")
    assert done.code == 0, done.err
    return digest(alone)


def test_a_killed_worker_and_a_killed_supervisor_are_replaced_though_nobody_follows(
    base: Path, sandbox_env: dict[str, str], cluster: Sandbox, straight: object
) -> None:
    killed = project(base, sandbox_env, cluster, "killed", kill="3:1 supervisor9:0")
    assert killed.run("launch", "--detach").code == 0
    job_log = killed.folder / ".dtctl" / "slurm" / record(killed).run / "job.log"
    job = read_job_reference(record(killed)).job
    wait_until(lambda: state(killed, job) not in WAITING | RUNNING, what="Slurm says that the job is over")
    told = killed.run("status", "--json")
    assert json.loads(told.out)["status"] == "succeeded", job_log.read_text()
    heals = [event for event in record(killed).events() if isinstance(event, WorkersReplaced)]
    replaced = [[(each.rank, each.node, each.by) for each in heal.replaced] for heal in heals]
    assert replaced == [[(1, "node2", "node2")], [(0, "node1", "node1")]], job_log.read_text()
    assert [[each.rank for each in heal.survivors] for heal in heals] == [[0], [1]]
    ended = [event for event in record(killed).events() if isinstance(event, WorkerExited)]
    assert [(event.rank, event.signal) for event in ended if event.exit_code] == [(1, 9)], "no other process has ended"
    assert all(heal.repeated_steps <= 1 for heal in heals)
    assert digest(killed) == straight
    facts = json.loads(told.out)
    assert (facts["attempt"], facts["done"]["left_behind"]) == (0, 0)
    ledger = json.loads((record(killed).folder / "ledger.json").read_text())
    assert ledger["phases_s"]["heal"] > 0
    assert ledger["phases_s"]["restart"] == 0


@pytest.mark.slow
def test_a_node_of_the_allocation_takes_the_place_of_a_lost_one(
    base: Path, sandbox_env: dict[str, str], cluster: Sandbox, straight: object
) -> None:
    lost = project(base, sandbox_env, cluster, "lost", kill="off9:1", spare=True)
    process = lost.start("launch", "--json")
    logs = lost.folder / ".dtctl" / "runs"
    wait_until(
        lambda: any("switched off" in path.read_text() for path in logs.glob("*/logs/node2/rank-1.log")), what="step 9"
    )
    faults.power_off_host(cluster, cluster.nodes[1])
    try:
        done = lost.finish(process)
    finally:
        faults.remove_host_faults(cluster, [cluster.nodes[1]])
    job_log = (record(lost).folder / "job.log").read_text()
    assert done.code == 0, done.err + job_log
    assert digest(lost) == straight
    assert done.done["attempts"] == 1, job_log
    (heal,) = [event for event in done.events if event["event"] == "heal"]
    assert [(each["rank"], each["node"], each["by"]) for each in heal["replaced"]] == [(1, "node2", "node3")]
    assert [each["rank"] for each in heal["survivors"]] == [0]
    assert [event["by"] for event in done.events if event["event"] == "replaced"] == ["node3"]
    metrics = (record(lost).folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [4, 8, 12, 16]
    assert done.err.count("waits to be switched off") >= 1, "what workers print is shown"


@pytest.mark.slow
def test_where_no_healing_succeeds_all_are_restarted_in_the_same_job(
    base: Path, sandbox_env: dict[str, str], cluster: Sandbox, straight: object
) -> None:
    late = project(base, sandbox_env, cluster, "late", kill="9:1", heal_s=0.001)
    done = late.run("launch", "--json")
    job_log = (record(late).folder / "job.log").read_text()
    assert done.code == 0, done.err + job_log
    assert digest(late) == straight
    assert (done.done["attempts"], done.done["left_behind"]) == (2, 0), job_log
    assert [event for event in done.events if event["event"] == "heal"] == []
    (restart,) = [event for event in done.events if event["event"] == "restart"]
    assert (restart["rank"], restart["attempt"]) == (1, 1)
    assert len([event for event in done.events if event["event"] == "allocated"]) == 1, "Slurm was not asked again"
