"""Whole batch files, compared with what is kept, and checked by bash. `UPDATE_GOLDEN=1` writes them anew."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dtctl.errors import PlanError
from dtctl.plan.build import PlanFacts, build
from dtctl.slurm.batch import render_batch_file
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes
from tests.facts import raises

HERE = Path(__file__).parent
NODES = "cluster: {transport: slurm, nodes: 4, slots: 8}\n"
HOSTILE_JOB = r"""job: {name: "x $(id) 'a' \"b\"", command: "echo '$HOME'", env: {A: "TASK\nb\n`c`"}}"""
CASES = {
    "plain": NODES
    + "job: {name: gpt, script: train.py, args: [--lr, 1e-3]}\nslurm: {partition: main, time: '4:00:00'}",
    "gres": NODES + "job: {name: gpt, script: train.py, kind: direct}\nslurm: {account: lab, qos: high, gres: 'gpu:8'}",
    "gpus": NODES + "job: {name: gpt, module: my.train}\nslurm: {extra: {gpus-per-node: 8, exclusive: true, mem: 0}}",
    "container": NODES
    + "job: {name: gpt, script: train.py, setup: [module load cuda]}\n"
    + "slurm: {srun: ['--container-image=docker://pytorch/pytorch', '--container-mounts=/data:/data']}",
    "array": NODES + "job: {name: gpt, script: train.py}\nslurm: {array: '0-9%2', requeues: 3, warn_s: 300}",
    "launch": NODES + "job: {name: gpt, script: train.py, kind: direct, max_restarts: 2}\nslurm: {partition: main}",
    "live": NODES.replace("nodes: 4", "nodes: 4, spares: [one, two]")
    + "job: {name: gpt, script: train.py, kind: direct, max_restarts: 2, recovery: live}\ntrain: {strategy: ddp}\n",
    "deepspeed": NODES
    + "job: {name: gpt, script: train.py, kind: deepspeed}\ntrain: {strategy: zero1, micro_batch: 2, accumulate: 4}",
    "accelerate": NODES + "job: {name: bert, script: train.py, kind: accelerate, max_restarts: 2}",
    "unequal": "cluster: {transport: slurm, nodes: [{name: big, slots: 8}, {name: 'small[1-2]', slots: 4}]}\n"
    + "job: {name: gpt, script: train.py, kind: direct}\nslurm: {partition: main, time: '4:00:00'}",
    "keys": "cluster: {transport: slurm, nodes: ['node[1-2]']}\n"
    + "job: {name: gpt, script: train.py, kind: direct, secrets: [KEY]}\n"
    + "slurm: {gres: 'gpu:4', cpus_per_task: 12, mem: 1G, exclusive: true, requeue: false,"
    + " nodelist: 'node[1-2]'}",
    "pyxis": "cluster: {transport: slurm, nodes: 2, slots: 2, python: /host/python}\n"
    + "job: {name: gpt, script: train.py}\n"
    + "slurm: {container: {image: 'nvcr.io#nvidia/pytorch:25.09-py3', mounts: ['/data:/data'], python: /opt/python}}",
    "apptainer": "cluster: {transport: slurm, nodes: 2, slots: 2}\njob: {name: gpt, script: train.py, kind: direct}\n"
    + "slurm: {container: {image: /images/a b.sif, runtime: apptainer, options: [--nv]}}",
    "plain-mode": NODES.replace("nodes: 4", "nodes: 4, spares: [one]")
    + "job: {name: gpt, script: train.py, args: [--lr, 1e-3], max_restarts: 3, hang_s: 60}\n"
    + "slurm: {launcher: none, partition: main, time: '4:00:00', gres: 'gpu:8', cpus_per_task: 48}",
    "plain-mode-most": "cluster: {transport: slurm, nodes: 2, slots: 2, python: /host/python}\n"
    + "job: {name: gpt, script: train.py, kind: accelerate, secrets: [KEY], setup: [module load a, module load b]}\n"
    + "train: {strategy: ddp}\n"
    + "slurm: {launcher: none, array: 0-9, srun: ['--mpi=pmix'],"
    + " container: {image: 'nvcr.io#nvidia/pytorch', python: python}}",
    "plain-mode-one-node": "cluster: {transport: slurm, nodes: 1, slots: 8}\n"
    + "job: {name: gpt, script: train.py, kind: direct}\nslurm: {launcher: none}",
    "hostile": NODES + HOSTILE_JOB + "\nslurm: {extra: {comment: 'a # b \"c\"'}}",
    "plain-mode-hostile": NODES + HOSTILE_JOB + "\nslurm: {launcher: none, extra: {comment: 'a # b \"c\"'}}",
}


OWN_FOLDER = Path("/shared/run-2")
"""Of a run whose tasks each work on a copy of its code."""
FOLDERS = {"plain-mode-most": OWN_FOLDER, "launch": Path("/shared/a 100%/run-1"), "live": Path("/shared/run-1")}


def made(spec_text: str, folder: Path | None = None) -> str:
    spec = parse_spec(spec_text, source="dtctl.yaml", base_dir=HERE)
    plan = build(spec, resolve_nodes(spec), run="run-1", facts=PlanFacts(environ={}))
    made = render_batch_file(
        spec,
        plan,
        chdir=folder / "work" if folder == OWN_FOLDER else Path("/code"),
        output=Path("/logs/%j.log"),
        folder=folder or Path("/code/.dtctl/slurm/run-1"),
        followed=folder is not None,
        launcher_digest="0" * 64,
    )
    return re.sub(r"dtctl [0-9.]+", "dtctl VERSION", made)


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_as_kept(case: str) -> None:
    found, kept = made(CASES[case], FOLDERS.get(case)), HERE / "sbatch" / f"{case}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(found)
    assert found == kept.read_text()


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_short(case: str) -> None:
    """Beside directives and set-up; nothing is sourced, and no program of another language stands in it."""
    lines = made(CASES[case], FOLDERS.get(case)).splitlines()
    others = [line for line in lines if line and not line.startswith(("#SBATCH ", "module load "))]
    assert len(others) <= 60
    assert not [line for line in lines if re.match(r"(source|\.) ", line)]


def test_slots_are_the_gpus_that_the_job_gets() -> None:
    lines = made(CASES["keys"]).splitlines()
    assert "#SBATCH --ntasks-per-node=4" in lines
    assert "#SBATCH --gres=gpu:4" in lines
    lines = made(CASES["unequal"]).splitlines()
    assert "#SBATCH --ntasks-per-node=8" in lines, "of unequal nodes all get what the largest needs"


def test_the_python_of_a_container_is_its_own() -> None:
    text = made(CASES["pyxis"])
    before, _, rest = text.partition("<<'TASK_")
    task, _, after = rest.partition("\nTASK_")
    assert "/opt/python -m torch.distributed.run" in task.replace(" \\\n  ", " ")
    assert "/host/python" not in text
    assert "/opt/python" not in before + after
    assert "--container-image=nvcr.io#nvidia/pytorch:25.09-py3" in after


@pytest.mark.parametrize("case", CASES)
def test_bash_reads_it(case: str, tmp_path: Path) -> None:
    (tmp_path / "job").write_text(made(CASES[case], FOLDERS.get(case)))
    done = subprocess.run(["bash", "-n", tmp_path / "job"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("train: {snapshot: {dir: d}}\nslurm: {array: 0-1}", "same snapshots"),
        ("train: {snapshot: {dir: d}}\nslurm: {array: 0-1, launcher: none}", "same snapshots"),
        ("slurm: {extra: {'a b': 1}}", "option sbatch"),
        ('slurm: {partition: "a\\nb"}', "batch file"),
    ],
)
def test_what_cannot_be_said_to_slurm(more: str, message: str) -> None:
    with raises(PlanError, message):
        made(NODES + "job: {script: a.py}\n" + more)


def test_what_plain_mode_cannot_start() -> None:
    nodes = "cluster: {transport: slurm, nodes: [{name: big, slots: 8}, {name: small, slots: 4}]}\n"
    with raises(PlanError, "same workers slurm.launcher none dtctl.yaml:1 slots gres python env"):
        made(nodes + "job: {script: a.py, kind: direct}\nslurm: {launcher: none}")
    with raises(PlanError, "several jobs gres"):
        unlike = "cluster: {transport: slurm, nodes: [{name: a, gres: 'gpu:a:8'}, {name: h, gres: 'gpu:b:4'}]}\n"
        made(unlike + "job: {script: a.py, kind: direct}")
    with raises(PlanError, "120,000 bytes srun slurm.launcher"):
        made(NODES + f"job: {{script: a.py, env: {{LONG: {'x' * 120_000}}}}}\nslurm: {{launcher: none}}")
    with raises(PlanError, "slurm.launcher none"):
        live = "job: {script: a.py, kind: direct, recovery: live}\ntrain: {strategy: ddp}\n"
        made(NODES + live + "slurm: {launcher: none}")
