"""A Slurm job without progress: noticed on its own nodes, whoever follows it; and where the time of a job went."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dtctl.launch.records.record import RunRecord, list_run_records
from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox, SandboxNode
from dtctl.slurm.job_watcher import read_job_reference
from tests.facts import missing
from tests.hosts import Project, wait_until
from tests.integration.progress_job import breaks_at_30, fails_after_7
from tests.integration.slurm_hosts import cluster, shared, state

__all__ = ["cluster", "shared"]

SPEC = """\
cluster: {{transport: slurm, nodes: 2, slots: 2, python: {python}}}
job: {{name: test, script: train.py, kind: {kind}, max_restarts: {restarts}, hang_s: {hang_s}}}
"""


def write(project: Project, act: str, *, kind: str = "direct", restarts: int = 1, hang_s: str = "2") -> None:
    python = json.dumps(sys.executable)
    project.write("dtctl.yaml", SPEC.format(python=python, kind=kind, restarts=restarts, hang_s=hang_s))
    project.write("train.py", breaks_at_30(act))


def record(project: Project) -> RunRecord:
    return list_run_records(project.folder)[-1]


def ledger(project: Project) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((record(project).folder / "ledger.json").read_text())
    return facts


def check_hang(project: Project, done: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """What a launch over SSH tells of the same hang."""
    assert (done["status"], done["exit_code"], done["attempts"], done["left_behind"]) == ("succeeded", 0, 2, 0)
    (hang,) = [event for event in events if event["event"] == "hang"]
    assert hang["silent_s"] >= 2
    (restart,) = [event for event in events if event["event"] == "restart"]
    told = {key: restart[key] for key in ("attempt", "of", "node", "rank", "reason")}
    assert told == {"attempt": 1, "of": 1, "node": "node2", "rank": 3, "reason": "made no progress"}
    folder = record(project).folder / "hangs" / "attempt-0"
    assert (folder / "node2" / "rank-3.txt").read_text().startswith("state T")
    assert "train.py" in (folder / "node1" / "rank-0.txt").read_text()
    facts = ledger(project)
    spent = facts["phases_s"]
    assert (facts["steps"], facts["steps_lost"]) == (40, 10)
    assert spent["hang"] >= 2
    wanted = ("connect", "start", "useful", "lost", "stall", "restart")
    assert [phase for phase in wanted if spent[phase] <= 0] == [], json.dumps(spent)
    assert spent["run"] == 0
    assert sum(spent.values()) == pytest.approx(facts["wall_s"], abs=0.01)
    assert done["goodput"] == facts["goodput"] > 0


STOP = "os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize("kind", ["direct", pytest.param("torchrun", marks=[pytest.mark.torch, pytest.mark.slow])])
def test_a_job_that_hangs_is_started_again_and_its_culprit_named(shared: Project, kind: str) -> None:
    write(shared, STOP, kind=kind)
    done = shared.run("launch", "--json")
    assert done.code == 0, done.err
    check_hang(shared, done.done, done.events)
    assert not missing(done.err, "restart 1 rank 3 node2 progress")


@pytest.mark.slow
def test_a_job_that_nobody_follows_is_judged_all_the_same(shared: Project) -> None:
    write(shared, STOP)
    assert shared.run("launch", "--detach").code == 0
    wait_until(lambda: state(shared, read_job_reference(record(shared)).job) == "COMPLETED", 90, "the job is over")
    said = json.loads(shared.run("status", "--json").out)
    events = [event.to_json() for event in record(shared).events()]
    check_hang(shared, said["done"], events)
    assert said["ledger"] == ledger(shared)
    times = [event["time"] for event in events if event["event"] in ("start", "hang", "restart")]
    assert times == sorted(times)
    assert times[-1] < said["done"]["time"] - 1, "when it happened, not when somebody looked"


def progress_folders(cluster: Sandbox, node: SandboxNode) -> set[str]:
    look = control.enter_argv(cluster, node, ["sh", "-c", "ls -d /tmp/dtctl-progress-* 2>/dev/null"])
    return set(subprocess.run(look, capture_output=True, text=True, check=False).stdout.split())


@pytest.mark.slow
def test_the_last_hang_is_the_jobs_failure(shared: Project, cluster: Sandbox) -> None:
    write(shared, "while True: pass", restarts=0)
    before = {node.name: progress_folders(cluster, node) for node in cluster.nodes}  # hosts share this machine's /tmp
    done = shared.run("launch", "--json")
    assert done.code == 8, done.err
    assert (done.done["status"], done.done["attempts"], done.done["left_behind"]) == ("failed", 1, 0)
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert (failure["exit_code"], failure["signal"]) == (None, None)
    assert failure["summary"].startswith("no progress for ")
    told = json.loads(shared.run("status", "--json").out)
    assert told["done"]["first_failure"] == failure
    for node in cluster.nodes:
        assert progress_folders(cluster, node) <= before[node.name], "files are left"


@pytest.mark.slow
def test_a_failure_that_comes_back_at_the_same_step_ends_the_job(shared: Project) -> None:
    """As over SSH, tests/integration/test_ledger.py."""
    write(shared, "pass", restarts=20, hang_s="60")
    shared.write("train.py", fails_after_7())
    done = shared.run("launch", "--json")
    assert (done.code, done.done["attempts"]) == (8, 2), done.err
    notes = [event["text"] for event in done.events if event["event"] == "note"]
    assert notes == ["not restarted: 2 attempts have failed with the same error after step 7"]
    assert done.done["first_failure"]["summary"] == "ValueError: the gradient of step 8 is not finite"  # type: ignore[index]
