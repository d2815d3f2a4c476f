"""What is lost between snapshots on disk comes from the memory of the nodes, to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import dtctl
from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox
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
  max_restarts: 2
  env: {{FAULT: "{fault}", OMP_NUM_THREADS: "1", PYTHONPATH: "{here}"}}
train: {{strategy: {strategy}, snapshot: {{every_steps: 1000, memory: {{every_steps: 3}}}}}}
"""
TRAIN = """\
import os, pathlib, signal, time
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

FAULT = os.environ["FAULT"]

def train(config, worker):
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(5))
    model = nn.Sequential(nn.Linear(8, 30), nn.Dropout(0.2), nn.ReLU(), nn.Linear(30, 1))

    def loss(model, batch):
        if FAULT and os.environ["DTCTL_ATTEMPT"] == "0" and trainer.step == 10:
            trainer.training.snapshots.in_memory.saver.wait()  # that of step 9
            print("HALTED", flush=True)
            if FAULT == "worker" and worker.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if FAULT == "byte" and worker.rank == 1:
                (spoilt,) = pathlib.Path(os.environ["DTCTL_MEMORY_DIR"]).glob("snapshots/*9/model.00001.safetensors")
                content = bytearray(spoilt.read_bytes())
                content[-1] ^= 1
                spoilt.write_bytes(content)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(config, worker, model, loss, TensorData(inputs, inputs.sum(1, keepdim=True)))
    return trainer.run()

if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"micro_batch": 4, "steps": 14, "log_every": 7, "timeout_s": 60}))
"""


def held(project: Project) -> str:
    """What is left in the memory of the hosts."""
    listing = (f"sandbox exec {node} -- ls /dev/shm" for node in ("node1", "node2", "node3"))
    return "".join(project.run(*line.split()).out for line in listing)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[str, object]]:
    """Strategy -> digest of a run that was left alone."""
    return {}


@pytest.mark.parametrize(
    ("strategy", "fault"), [("fsdp", "byte"), ("fsdp", "node"), pytest.param("tp", "worker", marks=pytest.mark.slow)]
)
def test_what_was_lost_comes_from_memory(
    project: Project, sandbox: Sandbox, undisturbed: dict[str, dict[str, object]], strategy: str, fault: str
) -> None:
    project.write("train.py", TRAIN)
    if strategy not in undisturbed:
        project.write("dtctl.yaml", SPEC.format(fault="", strategy=strategy, here=HERE))
        done = project.run("launch", "--name", f"{project.unique}-straight")
        assert done.code == 0, done.err
        undisturbed[strategy] = project.digest(f"{project.unique}-straight")
    project.write("dtctl.yaml", SPEC.format(fault=fault, strategy=strategy, here=HERE))
    process = project.start("launch", "--json", "--name", project.unique)
    wait_until(lambda: project.printed(project.unique).count("HALTED") == 2, 60, "both have saved and wait")
    if fault == "node":
        lost = sandbox.nodes[1]
        faults.power_off_host(sandbox, lost)
        faults.write_recorded_faults(sandbox, [f"kill {lost.name}"])
    done = project.finish(process)
    assert done.code == 0, done.err
    assert "resumed at step 9 of 14 from memory: nothing known differs" in project.printed(project.unique)
    assert "not exact: " not in project.printed(project.unique)
    assert project.digest(project.unique) == undisturbed[strategy]
    assert project.unique not in held(project)
