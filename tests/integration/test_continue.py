"""A run that was stopped with a snapshot is gone on from by the command that its last lines name."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import dtctl
from dtctl.launch.records.record import list_run_records
from tests.facts import missing
from tests.hosts import Project, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("session_sandbox")]

ROOT = Path(dtctl.__file__).parents[1]
SPEC = """\
cluster: {{transport: {transport}, slots: {slots}, workdir: "{workdir}"}}
job:
  {{name: test, script: train.py, kind: direct, grace_s: 30,
    env: {{PYTHONPATH: "{root}", OMP_NUM_THREADS: 1}}}}
train: {{micro_batch: 4, steps: {steps}, log_every: 1{more}}}
"""
SCRIPT = """\
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

def train(config, worker):
    torch.manual_seed(3)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    samples = TensorData(inputs, inputs.sum(1, keepdim=True))
    return Trainer(config, worker, nn.Linear(8, 1), lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]), samples).run()

if __name__ == "__main__":
    raise SystemExit(run(train))
"""  # noqa: E501


def write(project: Project, *, steps: int, transport: str = "local", slots: int = 2, more: str = "") -> None:
    project.write("train.py", SCRIPT)
    workdir = project.folder.parent / "work" if transport == "local" else "~/.dtctl"
    nodes = {"sandbox": "sandbox, nodes: 2"}.get(transport, transport)
    project.write(
        "dtctl.yaml",
        SPEC.format(transport=nodes, slots=slots, workdir=workdir, root=ROOT, steps=steps, more=more),
    )


def stopped(project: Project, *options: str, name: str = "first") -> str:
    """What a run of a million steps says that is asked to stop as a batch system does, after some of them."""
    process = project.start("launch", *options, "--json", "--name", f"{project.unique}-{name}")
    metrics = project.folder / ".dtctl" / "runs" / f"{project.unique}-{name}" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, what="it trains")
    process.send_signal(signal.SIGUSR1)
    done = project.finish(process)
    assert (done.code, done.done["status"]) == (75, "stopped"), done.err
    return done.err


@pytest.mark.parametrize("transport", ["local", pytest.param("sandbox", marks=pytest.mark.slow)])
def test_the_named_command_goes_on_and_a_plain_launch_begins_anew(project: Project, transport: str) -> None:
    write(project, steps=1_000_000, transport=transport, slots=2 if transport == "local" else 1)
    command = f"dtctl launch --resume {project.unique}-first"
    assert f": {command}  (" in stopped(project)
    listed = json.loads(project.run("snapshot", "ls", f"{project.unique}-first", "--json").out)["snapshots"]
    newest = max(row["step"] for row in listed)
    steps = ["--set", f"train.steps={newest + 3}"]
    again = project.run(*command.split()[1:], *steps, "--json", "--name", f"{project.unique}-second")
    assert again.code == 0, again.err
    assert f"resumed at step {newest} of {newest + 3}: " in again.err
    record = (list_run_records(project.folder)[-1].folder / "events.jsonl").read_text()
    events = [json.loads(line) for line in record.splitlines()]
    found = {row["event"]: row for row in events if row["event"] in ("resumed", "confirmed")}
    assert found.keys() == {"resumed", "confirmed"}
    assert (found["resumed"]["step"], found["resumed"]["verdict"]) == (newest, None)
    assert found["resumed"]["why"] == found["confirmed"]["why"] == [f"steps changed from 1000000 to {newest + 3}"]
    # The learning rate follows from the number of steps.
    confirmed = {key: found["confirmed"][key] for key in ("step", "verdict", "steps", "differs")}
    assert confirmed == {"step": newest, "verdict": "not-exact", "steps": 0, "differs": "update"}
    # It is a run with the same snapshots, which can be gone on from in turn.
    listed = json.loads(project.run("snapshot", "ls", "--json").out)["snapshots"]
    assert max(row["step"] for row in listed) == newest + 3
    third = project.run(
        "launch", "--resume", f"{project.unique}-second", "--set", f"train.steps={newest + 5}", "--detach"
    )
    assert third.code == 0, third.err
    last = list_run_records(project.folder)[-1]
    wait_until(lambda: json.loads(project.run("status", last.run, "--json").out)["status"] == "succeeded")
    assert f"resumed at step {newest + 3} of {newest + 5}: " in project.run("logs", last.run).out
    anew = project.run("launch", "--set", "train.steps=2", "--json")
    assert anew.code == 0
    assert "resumed" not in anew.err


@pytest.mark.parametrize("relative", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_folder_of_its_own(project: Project, relative: bool) -> None:
    folder = "mine" if relative else str(project.folder.parent / "mine")
    write(project, steps=1_000_000, more=f', snapshot: {{dir: "{folder}"}}')
    said = stopped(project)
    if not relative:
        assert not missing(said, f"snapshot {folder}")
    project.write("train.py", SCRIPT + "# another tree has another folder of code\n")
    resume = ["--resume", f"{project.unique}-first"] if relative else []
    assert "resumed at step " in stopped(project, *resume, name="second")


def test_a_run_that_has_none_or_is_not_over_is_refused(project: Project) -> None:
    write(project, steps=1_000_000)
    project.write("none.py", "print(1)")
    assert project.run("launch", "--set", "job.script=none.py", "--name", f"{project.unique}-none").code == 0
    refused = project.run("launch", "--resume", f"{project.unique}-none")
    assert (refused.code, f"run {project.unique}-none has no snapshot to resume from" in refused.err) == (7, True)
    assert project.run("launch", "--detach", "--name", f"{project.unique}-on").code == 0
    refused = project.run("launch", "--resume", f"{project.unique}-on")
    assert (refused.code, f"run {project.unique}-on is not over" in refused.err) == (7, True)
    assert project.run("stop", f"{project.unique}-on").code == 0
    assert project.run("launch", "--resume", "nobody").code == 7
