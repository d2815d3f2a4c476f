"""A training that makes no progress is noticed from outside, its culprit named, and it is started again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import dtctl
from tests.hosts import Finished, Project

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("session_sandbox")]

ROOT = Path(dtctl.__file__).parents[1]
SPEC = """\
cluster: {{transport: sandbox, nodes: [{nodes}], slots: 1}}
job:
  {{name: test, script: train.py, kind: {kind}, grace_s: 2, max_restarts: {restarts}, hang_s: {hang_s},
    hang_start_s: 8, env: {{PYTHONPATH: "{root}", OMP_NUM_THREADS: 1}}}}
"""
NODES = {"direct": "node1, {name: node2, slots: 2}", "torchrun": "node1, node2, node3"}
"""For three workers, of which the second is on the second node; torchrun needs as many on every node."""
SCRIPT = """\
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

def train(config, worker):
    first = os.environ["DTCTL_ATTEMPT"] == "0"

    def loss(model, batch):
        if first and trainer.step == AT and worker.rank == 1:
            misbehave()
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def score(model, batch):
        if SLOW:
            time.sleep(SLOW)
        return {{"loss": (model(batch[0]) - batch[1]).square().mean(1)}}

    def misbehave():
        {act}

    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    samples = TensorData(inputs, inputs.sum(1, keepdim=True))
    trainer = Trainer(config, worker, nn.Linear(8, 1), loss, samples, validation=samples, score=score)
    return trainer.run()

SLOW, AT = {slow}, {at}
if __name__ == "__main__":
    if SLOW:
        time.sleep(SLOW)
    raise SystemExit(run(train, defaults={{
        "micro_batch": 4, "steps": 12, "log_every": 4, "snapshot": {{"every_steps": 4}}, "timeout_s": 100,
        "eval_every": 5,
    }}))
"""


def launch(
    project: Project,
    act: str,
    *,
    kind: str = "direct",
    restarts: int = 1,
    hang_s: str = "3",
    slow: float = 0,
    at: int = 6,
):
    project.write("train.py", SCRIPT.format(act=act, slow=slow, at=at))
    project.write("dtctl.yaml", SPEC.format(nodes=NODES[kind], root=ROOT, kind=kind, restarts=restarts, hang_s=hang_s))
    return project.run("launch", "--json", "--name", project.unique)


def stacks(project: Project) -> dict[str, str]:
    folder = project.folder / ".dtctl" / "runs" / project.unique / "hangs" / "attempt-0"
    return {path.name: path.read_text() for path in sorted(folder.glob("*/*"))}


def reasons(done: Finished) -> list[str]:
    return [str(event["reason"]) for event in done.events if event["event"] == "stopping"]


@pytest.mark.parametrize(
    ("act", "said", "kind"),
    [
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "rank 1 on node2 is stopped (SIGSTOP)",
            "direct",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "time.sleep(1000)", "rank 1 on node2 is stuck in a forward pass at ", "torchrun", marks=pytest.mark.slow
        ),
        ("dist.recv(torch.zeros(1), src=0)", "rank 1 on node2 is stuck in a forward pass at ", "direct"),
    ],
    ids=["stopped", "sleeps", "never-enters"],
)
def test_the_culprit_is_named_and_the_gang_is_started_again(project: Project, act: str, said: str, kind: str) -> None:
    done = launch(project, act, kind=kind)
    assert done.code == 0, done.err
    assert done.done["attempts"] == 2
    (reason,) = reasons(done)
    assert reason.startswith("no progress for ")
    assert "s in step 7: " + said in reason
    assert "the 2 others wait for it" in reason
    found = stacks(project)
    assert {"rank-0.txt", "rank-1.txt", "rank-2.txt"} <= found.keys()
    assert "train.py" in found["rank-0.txt"]
    if "sleep" in act:
        assert "in misbehave" in found["rank-1.txt"]
    flight = json.loads(found["trace_rank_0.json"])
    assert any("all_reduce" in str(entry.get("profiling_name", "")) for entry in flight["entries"])
    assert "resumed at step 4 of 12" in done.err
    ledger = json.loads((project.folder / ".dtctl" / "runs" / project.unique / "ledger.json").read_text())
    assert sum(ledger["phases_s"].values()) == pytest.approx(ledger["wall_s"], rel=0.01)
    assert ledger["phases_s"]["hang"] >= 2.5
    assert (ledger["steps"], ledger["steps_lost"]) == (12, 2)
    restart = next(event for event in done.events if event["event"] == "restart")
    assert restart["reason"] == "made no progress"


def test_a_hang_at_the_same_step_every_time_is_told_as_one(project: Project) -> None:
    project.write("train.py", SCRIPT.format(act="time.sleep(1000)", slow=0, at=6).replace("first and ", ""))
    project.write("dtctl.yaml", SPEC.format(nodes=NODES["direct"], root=ROOT, kind="direct", restarts=9, hang_s="2"))
    done = project.run("launch", "--json")
    assert done.code == 8, done.err
    assert done.done["attempts"] == 3
    assert "not restarted: 3 attempts have failed in the same way at step 6" in [
        event["text"] for event in done.events if event["event"] == "note"
    ]
    first = done.done["first_failure"]
    assert (first["node"], first["rank"], first["exit_code"]) == ("node2", 1, None)  # type: ignore[index]
    assert "hangs/attempt-2/node2/rank-1.txt" in first["log"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("act", "at", "kind", "said"),
    [
        # Its process lives on, and so do its connections: the others wait.
        (
            "threading.Thread(target=time.sleep, args=(1000,)).start(); sys.exit(0)", 0, "direct",
            r"no progress for \d+ s in step 1: rank 1 on node2 left the training after step 0 of 12, before "
            r"the others, and is now at \S+ in _shutdown; the 2 others wait for it",
        ),
        pytest.param(
            "threading.Thread(target=time.sleep, args=(1000,)).start(); sys.exit(0)", 6, "torchrun",
            r"no progress for \d+ s in step 7: rank 1 on node2 left the training after step 6 of 12, before "
            r"the others, and is now at \S+ in _shutdown; the 2 others wait for it",
            marks=pytest.mark.slow,
        ),
        # Gone: the others lose their connections.
        (
            "sys.exit(0)", 0, "direct",
            r"rank 1 left the training after step 0 of 12, before the others, without an error, "
            r"and rank \d on node\d lost the connection to it",
        ),
        pytest.param(
            "sys.exit(0)", 6, "torchrun",
            r"rank 1 left the training after step 6 of 12, before the others, without an error, "
            r"and rank \d on node\d lost the connection to it",
            marks=pytest.mark.slow,
        ),
        # It computes for ever before the first step is through.
        (
            "time.sleep(1000)", 0, "direct",
            r"no progress for \d+ s in step 1: rank 1 on node2 is stuck in a forward pass at \S+ in misbehave; "
            "the 2 others wait for it",
        ),
    ],
    ids=["leaves", "leaves-torchrun", "ends", "ends-torchrun", "first-step"],
)  # fmt: skip
def test_who_leaves_early_is_named_also_in_the_first_step(
    project: Project, act: str, at: int, kind: str, said: str
) -> None:
    # On a busy machine a connection may be lost later than a short wait for progress ends.
    hang_s = "20" if "lost the connection" in said else "3"
    done = launch(project, act, kind=kind, restarts=0, at=at, hang_s=hang_s)
    assert done.code == 8, done.err
    first = done.done["first_failure"]
    assert (first["node"], first["rank"]) == ("node2", 1)  # type: ignore[index]
    assert re.fullmatch(said, first["summary"]), first  # type: ignore[index]
    assert done.done["left_behind"] == 0


@pytest.mark.slow
def test_slow_starts_and_evaluations_are_no_hang(project: Project) -> None:
    done = launch(project, "pass", hang_s="1.5", slow=0.3)
    assert done.code == 0, done.err
    assert done.done["attempts"] == 1
    assert not [event for event in done.events if event["event"] == "hang"]


def test_programs_that_tell_no_progress_are_left_alone(project: Project) -> None:
    project.write("train.py", "import time; time.sleep(4)")
    project.write("dtctl.yaml", SPEC.format(nodes=NODES["direct"], root=ROOT, kind="direct", restarts=0, hang_s="1"))
    done = project.run("launch", "--json")
    assert done.code == 0, done.err
    assert not [event for event in done.events if event["event"] == "hang"]
