"""The ledger of real runs, whose workers note their progress as a training does, but without torch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import dtctl
from tests.hosts import Project
from tests.integration.progress_job import breaks_at_30, fails_after_7

ROOT = Path(dtctl.__file__).parents[1]
SPEC = """\
cluster: {{transport: local, slots: 2, workdir: "{workdir}"}}
job:
  {{name: test, script: train.py, kind: direct, grace_s: 1, max_restarts: 1, preload: [], {more}
    env: {{PYTHONPATH: "{root}"}}}}
"""


def launch(project: Project, act: str, more: str = "") -> tuple[dict[str, Any], float, dict[str, Any]]:
    """Its ledger, the seconds that it took by a clock outside, and its last event."""
    project.write("train.py", breaks_at_30(act))
    project.write("dtctl.yaml", SPEC.format(workdir=project.folder.parent / "work", root=ROOT, more=more))
    begun = time.monotonic()
    done = project.run("launch", "--json", "--name", project.unique)
    wall_s = time.monotonic() - begun
    assert done.events[-1]["event"] == "done", done.err
    ledger = json.loads((project.folder / ".dtctl" / "runs" / project.unique / "ledger.json").read_text())
    return ledger, wall_s, done.done


def test_each_second_of_a_run_that_was_killed_is_accounted_for_once(project: Project) -> None:
    ledger, wall_s, done = launch(project, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (done["exit_code"], done["attempts"]) == (0, 2)
    spent = ledger["phases_s"]
    assert sum(spent.values()) == pytest.approx(ledger["wall_s"], abs=0.01)
    assert ledger["wall_s"] <= wall_s, "the end of the interpreter is not in it"
    assert (ledger["steps"], ledger["steps_lost"]) == (40, 10)
    # Times of a busy machine have no upper limit. At least: 30 and 20 steps of 50 ms, two starts of 300 ms, and
    # snapshots of 100 ms after 10, 20 and 30 steps and after 30 and 40.
    assert spent["stall"] >= 0.5
    assert spent["start"] + spent["useful"] + spent["lost"] >= 2 * 0.3 + 50 * 0.05 - 0.01
    assert min(spent["start"], spent["useful"], spent["lost"]) > 0
    assert spent["run"] == 0
    assert ledger["goodput"] == pytest.approx(spent["useful"] / ledger["wall_s"], abs=0.001)
    assert 0 < done["goodput"] <= ledger["goodput"], "it is asked for later, when more time has passed"
    lines = (project.folder / ".dtctl" / "runs" / project.unique / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert events[-1]["time"] - events[0]["time"] <= ledger["wall_s"] + 0.1, "a ledger that misses some of it"
    [restart] = [event for event in events if event["event"] == "restart"]
    assert (restart["node"], restart["rank"]) == ("localhost", 1)
    told = [event["step"] for event in events if event["event"] == "snapshot"]
    assert told, "nodes tell of their workers once a second"
    assert told == sorted(told)
    assert set(told) <= {10, 20, 30, 40}
    shown = project.run("status", project.unique)
    assert "time: useful " in shown.out
    assert json.loads(project.run("status", project.unique, "--json").out)["ledger"] == ledger


def test_a_worker_that_is_stopped_is_named_and_its_time_is_a_hang(project: Project) -> None:
    ledger, _, done = launch(project, "os.kill(os.getpid(), signal.SIGSTOP)", "hang_s: 2,")
    assert (done["exit_code"], done["attempts"]) == (0, 2)
    assert ledger["phases_s"]["hang"] >= 2
    assert sum(ledger["phases_s"].values()) == pytest.approx(ledger["wall_s"], abs=0.01)
    folder = project.folder / ".dtctl" / "runs" / project.unique / "hangs" / "attempt-0" / "localhost"
    assert (folder / "rank-1.txt").read_text().startswith("state T")
    assert "train.py" in (folder / "rank-0.txt").read_text()


def test_the_time_of_a_job_is_up(project: Project) -> None:
    ledger, _, done = launch(project, "pass", "time_s: 2,")
    assert (done["status"], done["exit_code"], done["left_behind"]) == ("stopped", 75, 0)
    assert ledger["phases_s"]["restart"] == 0


def test_a_failure_at_the_same_step_every_time_ends_the_run_and_names_the_step(project: Project) -> None:
    project.write("train.py", fails_after_7())
    text = SPEC.format(workdir=project.folder.parent / "work", root=ROOT, more="")
    project.write("dtctl.yaml", text.replace("max_restarts: 1", "max_restarts: 20"))
    done = project.run("launch", "--json")
    assert (done.code, done.done["attempts"]) == (8, 2)
    notes = [event["text"] for event in done.events if event["event"] == "note"]
    assert notes == ["not restarted: 2 attempts have failed with the same error after step 7"]
