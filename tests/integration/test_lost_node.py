"""A node is lost for good, with its disk, and no disk is shared: the run goes on from the copies, to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dtctl
from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.hosts import Project, wait_until

pytestmark = pytest.mark.torch

HERE = Path(dtctl.__file__).parents[1]
SPEC = """\
cluster:
  transport: sandbox
  nodes: [node1, node2]
  spares: [node3]
  slots: 1
  connect_timeout_s: 2
  link_timeout_s: 3
job:
  name: test
  script: train.py
  kind: direct
  grace_s: 1
  max_restarts: 1
  env: {{HALT: "{halt}", OMP_NUM_THREADS: "1", PYTHONPATH: "{here}"}}
train: {{strategy: {strategy}, snapshot: {{every_steps: 4, replicas: {replicas}}}}}
"""
TRAIN = """\
import os, time
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

def train(config, worker):
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(5))
    model = nn.Sequential(nn.Linear(8, 30), nn.Dropout(0.2), nn.ReLU(), nn.Linear(30, 1))
    where = (os.environ["HALT"], os.environ["DTCTL_ATTEMPT"])

    def loss(model, batch):
        if where == ("1", "0") and trainer.step == 10:
            trainer.training.snapshots.saver.finish()  # that of step 8
            print("HALTED", flush=True)
            time.sleep(1000)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(config, worker, model, loss, TensorData(inputs, inputs.sum(1, keepdim=True)))
    return trainer.run()

if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"micro_batch": 4, "steps": 14, "log_every": 7, "timeout_s": 60}))
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.slow
def test_a_spare_goes_on_from_copies_of_what_the_lost_node_had(
    project: Project, sandbox: Sandbox, strategy: str
) -> None:
    project.write("train.py", TRAIN)
    project.write("dtctl.yaml", SPEC.format(halt=0, strategy=strategy, replicas=0, here=HERE))
    undisturbed = f"{project.unique}-straight"
    done = project.run("launch", "--name", undisturbed)
    assert done.code == 0, done.err
    expected = project.digest(undisturbed)
    if strategy == "fsdp":
        look_at_halves(project, undisturbed)
    project.write("dtctl.yaml", SPEC.format(halt=1, strategy=strategy, replicas=1, here=HERE))
    process = project.start("launch", "--json", "--name", project.unique)
    wait_until(lambda: project.printed(project.unique).count("HALTED") == 2, 60, "both have saved and wait")
    # With ddp the first node has everything, and is the one that goes; with fsdp each has a half.
    lost = sandbox.nodes[0 if strategy == "ddp" else 1]
    faults.power_off_host(sandbox, lost)
    faults.write_recorded_faults(sandbox, [f"kill {lost.name}"])
    done = project.finish(process)
    assert done.code == 0, done.err
    assert not missing(done.err, f"{lost.name} replaced node3")
    assert "resumed at step 8 of 14: nothing known differs" in project.printed(project.unique)
    assert "exact: " in project.printed(project.unique)
    assert project.digest(project.unique) == expected
    assert expected["step"] == 14


@pytest.mark.slow
def test_a_node_that_is_lost_while_the_next_attempt_is_prepared(project: Project, sandbox: Sandbox) -> None:
    project.write("train.py", TRAIN)
    spec = SPEC.replace("max_restarts: 1", "max_restarts: 3").replace("spares: [node3]", "spares: []")
    project.write("dtctl.yaml", spec.format(halt=1, strategy="ddp", replicas=0, here=HERE))
    process = project.start("launch", "--json", "--name", project.unique)
    wait_until(lambda: project.printed(project.unique).count("HALTED") == 2, 60, "both have saved and wait")
    events = project.folder / ".dtctl" / "runs" / project.unique / "events.jsonl"
    second, first = sandbox.nodes[1], sandbox.nodes[0]
    faults.power_off_host(sandbox, second)
    wait_until(lambda: "retrying in" in events.read_text(), 60, "it is called")
    faults.power_off_host(sandbox, first)
    faults.remove_host_faults(sandbox, [first, second])
    done = project.finish(process)
    assert done.code == 0, done.err
    assert "resumed at step 8 of 14: nothing known differs" in project.printed(project.unique)
    assert "exact: " in project.printed(project.unique)


@pytest.mark.slow
def test_a_node_that_was_lost_with_the_only_copy_is_missed(project: Project, sandbox: Sandbox) -> None:
    """The others have nothing that tells of it: only the launcher knows that the run has trained before."""
    project.write("train.py", TRAIN)
    project.write("dtctl.yaml", SPEC.format(halt=1, strategy="ddp", replicas=0, here=HERE))
    process = project.start("launch", "--json", "--name", project.unique)
    wait_until(lambda: project.printed(project.unique).count("HALTED") == 2, 60, "both wait after a snapshot")
    ledger = project.folder / ".dtctl" / "runs" / project.unique / "ledger.json"
    for _ in range(2):  # it is written of what nodes tell each second, so that all have told by the second time
        before = ledger.stat().st_mtime_ns if ledger.exists() else 0
        wait_until(lambda before=before: ledger.exists() and ledger.stat().st_mtime_ns > before, 60, "the ledger grows")
    faults.power_off_host(sandbox, sandbox.nodes[0])
    faults.write_recorded_faults(sandbox, [f"kill {sandbox.nodes[0].name}"])
    done = project.finish(process)
    assert done.code == 8, done.err
    assert "this run has written a snapshot of step 8, but it is missing now" in done.err + project.printed(
        project.unique
    )
    assert "train.snapshot.replicas" in done.err + project.printed(project.unique)


def look_at_halves(project: Project, run: str) -> None:
    """Commands on a run without copies, whose two nodes have half of every snapshot each."""
    done = project.run("snapshot", "verify", run, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["snapshots"]
    assert [(row["step"], row["status"], row["node"]) for row in rows] == [
        (14, "ok", "node1, node2"),
        (12, "ok", "node1, node2"),
    ]
    assert project.run("snapshot", "export", run, "-o", "w.safetensors").code == 0
    assert (project.folder / "w.safetensors").stat().st_size > 301 * 4
    said = json.loads(project.run("snapshot", "prune", run, "--keep", "1", "--dry-run", "--json").out)
    places = [(one["node"], len(one["kept"]), [Path(path).name for path in one["removed"]]) for one in said["places"]]
    assert places == [("node1", 1, ["step-00000012"]), ("node2", 1, ["step-00000012"])]
    assert project.run("snapshot", "prune", run).code == 0, "by its own rule nothing goes"
    assert [row["step"] for row in json.loads(project.run("snapshot", "verify", run, "--json").out)["snapshots"]] == [
        14,
        12,
    ]
    assert project.run("snapshot", "show", run).code == 0
    spoilt = f"{rows[0]['path']}/model.00001.safetensors"
    assert project.run("sandbox", "exec", "node2", "--", "truncate", "-s", "-1", spoilt).code == 0
    done = project.run("snapshot", "verify", run, "--json")
    assert done.code == 10
    found = json.loads(done.out)
    assert [row["status"] for row in found["snapshots"]] == ["corrupt", "ok"]
    assert found["snapshots"][0]["bad"][0].startswith("node2: model.00001.safetensors has ")
    assert found["newest_good"] == rows[1]["path"]
    assert project.digest(run)["step"] == 12
    assert project.run("snapshot", "prune", run, "--keep", "1").code == 0
    done = project.run("snapshot", "verify", run, "--json")
    assert [(row["step"], row["status"]) for row in json.loads(done.out)["snapshots"]] == [(12, "ok")]
