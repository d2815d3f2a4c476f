"""Programs of other frameworks, unmodified, on two virtual hosts: over SSH with a worker killed, and on real Slurm.

`make test-frameworks` runs this; `make test` does not. What was found is kept in benchmarks/results/frameworks.json.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtctl.sandbox import control, slurm
from dtctl.sandbox.layout import Sandbox
from tests.frameworks.environments import FOLDER, python_of, versions
from tests.hosts import Project, wait_until, workers
from tests.integration.slurm_hosts import state

HERE = Path(__file__).parent
TEMPLATES = HERE.parent.parent / "templates" / "init"
RESULTS = HERE.parent.parent / "benchmarks" / "results" / "frameworks.json"
NODES = 2
LIMIT_S = 150.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One framework's program and how a spec says what it needs."""

    package: str
    program: Path
    job: str
    train: str
    says: str
    """What the program prints when it has found its peers and its settings."""


CASES = {
    "accelerate": Case(
        package="accelerate",
        program=HERE / "programs" / "with_accelerate.py",
        job="kind: accelerate, args: [--cpu, --output_dir, {folder}]",
        train="{strategy: ddp, precision: bf16}",
        says="DistributedType.MULTI_CPU bf16 on 2",
    ),
    "deepspeed": Case(
        package="deepspeed",
        program=HERE / "programs" / "with_deepspeed.py",
        job="kind: deepspeed, add_args: [local_rank, deepspeed_config], args: [--backend, gloo, --load_dir, {folder}, "
        f"--save_dir, {{folder}}], env: {{{{TORCH_EXTENSIONS_DIR: {FOLDER / 'torch-extensions'}}}}}",
        train="{strategy: zero1, micro_batch: 8, clip_norm: 0.5}",
        says="rank of 2 local 0 stage 1 micro 8 clip 0.5",
    ),
    "lightning": Case(
        package="lightning",
        program=HERE / "programs" / "with_lightning.py",
        job="kind: torchrun, args: [--num_nodes, 2, --dirpath, {folder}]",
        train="",
        says="rank of 2",
    ),
    "megatron": Case(
        package="megatron-core",
        program=TEMPLATES / "megatron" / "train.py",
        job="kind: torchrun, args: [--tensor-model-parallel-size, 2, --train-iters, 150, --micro-batch-size, 4, "
        "--save-interval, 20, --save, {folder}, --load, {folder}]",
        train="",
        says="step 10/150",
    ),
}
SPEC = """\
cluster: {{transport: {transport}, nodes: 2, slots: 1, python: {python}}}
job: {{name: {name}, script: train.py, max_restarts: 2, {job}}}
"""


@pytest.fixture(scope="module")
def hosts(sandbox_env: dict[str, str]) -> Iterator[Sandbox]:
    sandbox = control.start_sandbox(f"frameworks-{secrets.token_hex(3)}", nodes=NODES, with_slurm=True)
    yield sandbox
    control.remove_sandbox(sandbox.name)


@pytest.fixture
def shared(sandbox_env: dict[str, str], hosts: Sandbox) -> Iterator[Project]:
    """A project in a folder that all hosts see, with an empty folder for checkpoints."""
    folder = Path(os.environ["DTCTL_SANDBOX_DIR"]) / f"shared-{secrets.token_hex(3)}"
    (folder / "checkpoints").mkdir(parents=True)
    project = Project(folder, {**sandbox_env, **slurm.build_slurm_environment(hosts), "DTCTL_SANDBOX": hosts.name})
    yield project
    project.close()
    shutil.rmtree(folder)


def prepare(project: Project, name: str, transport: str) -> Case:
    case = CASES[name]
    shutil.copyfile(case.program, project.folder / "train.py")
    job = case.job.format(folder=project.folder / "checkpoints")
    spec = SPEC.format(transport=transport, python=python_of(name), name=name, job=job)
    project.write("dtctl.yaml", spec + (f"train: {case.train}\n" if case.train else ""))
    return case


def note(name: str, road: str, seconds: float, **more: object) -> None:
    """Keep a row of what was found; one that is there already is replaced."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    installed = versions(python_of(name), CASES[name].package, "torch")
    rows[f"{name}, {road}"] = {
        "date": time.strftime("%Y-%m-%d"),
        "nodes": NODES,
        "versions": installed,
        "verdict": "passed",
        "seconds": round(seconds, 1),
        **more,
    }
    RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


def saved(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"saved step (\d+)|step (\d+)/150", text) for step in step if step]


def output(project: Project) -> str:
    """What rank 0 has printed so far, in all attempts."""
    return "".join(log.read_text() for log in project.folder.glob(".dtctl/runs/*/logs/*/rank-0.log"))


def kill_a_worker(sandbox: Sandbox, python: Path) -> None:
    """SIGKILL for the worker on the last node; with torchrun its agent stays."""
    lines = workers(sandbox.nodes[-1])
    ours = {pid: line for pid, line in lines.items() if line.startswith(str(python.parent)) and "train.py" in line}
    found = [pid for pid, line in ours.items() if "torch.distributed.run" not in line]
    assert found, lines
    os.kill(max(found), signal.SIGKILL)


@pytest.mark.parametrize("name", CASES)
def test_over_ssh_a_killed_worker_costs_the_steps_since_the_last_checkpoint(
    shared: Project, hosts: Sandbox, name: str
) -> None:
    case = prepare(shared, name, "sandbox")
    begun = time.monotonic()
    process = shared.start("launch", "--json")
    wait_until(lambda: len(saved(output(shared))) > 1 or process.poll() is not None, LIMIT_S, "a checkpoint")
    assert process.poll() is None, shared.finish(process).err
    kill_a_worker(hosts, python_of(name))
    try:
        done = shared.finish(process, timeout_s=LIMIT_S)
    except subprocess.TimeoutExpired:
        logs = sorted(shared.folder.glob(".dtctl/runs/*/logs/*/*"))
        pytest.fail("no end: " + "".join(f"\n== {log}\n{log.read_text()[-2000:]}" for log in logs))
    text = output(shared)
    assert done.code == 0, done.err + text[-3000:]
    assert case.says in text
    resumed = resumed_at(text)
    assert resumed, text[-3000:]
    assert done.done["attempts"] == len(resumed) + 1
    assert done.done["left_behind"] == 0
    note(name, "SSH, a worker killed", time.monotonic() - begun, resumed_at=resumed, attempts=done.done["attempts"])


@pytest.mark.parametrize("name", CASES)
def test_on_slurm_too(shared: Project, hosts: Sandbox, name: str) -> None:
    case = prepare(shared, name, "slurm")
    begun = time.monotonic()
    done = shared.run("sbatch", "--submit", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    log = Path(said["log"])
    ends = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")

    def written() -> str:
        return log.read_text() if log.exists() else ""

    # Both nodes write into one file, so each step may stand there twice.
    wait_until(
        lambda: len(set(saved(written()))) > 1 or state(shared, said["job"]) in ends, LIMIT_S, "a second checkpoint"
    )
    assert state(shared, said["job"]) == "RUNNING", written()[-3000:]
    kill_a_worker(hosts, python_of(name))
    wait_until(lambda: state(shared, said["job"]) in ends, LIMIT_S, "the job ends")
    text = log.read_text()
    assert state(shared, said["job"]) == "COMPLETED", text[-3000:]
    assert case.says in text
    resumed = sorted(set(resumed_at(text)))
    assert resumed, text[-3000:]
    note(name, "Slurm, a worker killed", time.monotonic() - begun, resumed_at=resumed)


def resumed_at(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"(?:Resumed from checkpoint:|resumed at) step (\d+)", text)]


@pytest.mark.parametrize("name", CASES)
def test_a_project_made_from_the_template_trains(tmp_path: Path, sandbox_env: dict[str, str], name: str) -> None:
    project = Project(tmp_path, sandbox_env)
    begun = time.monotonic()
    made = project.run("init", "p", "--template", name)
    assert made.code == 0, made.err
    inside = Project(tmp_path / "p", {**sandbox_env, "TORCH_EXTENSIONS_DIR": str(FOLDER / "torch-extensions")})
    changes = [f"cluster.python={python_of(name)}", f"cluster.workdir={tmp_path / 'node'}"]
    if name == "deepspeed":
        changes.append("job.env_from=[TORCH_EXTENSIONS_DIR]")
    done = inside.run("launch", *[word for change in changes for word in ("--set", change)], timeout_s=LIMIT_S)
    assert done.code == 0, done.err[-3000:] + done.out[-1000:]
    assert re.search(r"loss 0\.\d+", done.out), done.out
    note(name, "project from the template, 2 workers here", time.monotonic() - begun)
