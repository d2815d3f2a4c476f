"""Whole batch files, compared with what is kept, and checked by bash. `UPDATE_GOLDEN=1` writes them anew."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dtctl.errors import PlanError
from dtctl.plan.build import PlanFacts, build
from dtctl.slurm.batch import text
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes

HERE = Path(__file__).parent
NODES = "cluster: {transport: slurm, nodes: 4, slots: 8}\n"
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
    "deepspeed": NODES
    + "job: {name: gpt, script: train.py, kind: deepspeed}\ntrain: {strategy: zero1, micro_batch: 2, accumulate: 4}",
    "het": "cluster: {transport: slurm, nodes: [{name: big, slots: 8}, {name: 'small[1-2]', slots: 4}]}\n"
    + "job: {name: gpt, script: train.py, kind: direct}\nslurm: {partition: main, time: '4:00:00'}",
    "hostile": NODES
    + r"""job: {name: "x $(id) 'a' \"b\"", command: "echo $HOME", env: {A: "TASK\nb\n`c`"}}"""
    + "\nslurm: {extra: {comment: 'a # b \"c\"'}}",
}


FOLDERS = {"launch": Path("/shared/a 100%/run-1")}


def made(spec_text: str, folder: Path | None = None) -> str:
    spec = parse_spec(spec_text, source="dtctl.yaml", base_dir=HERE)
    plan = build(spec, resolve_nodes(spec), run="run-1", facts=PlanFacts(environ={}))
    made = text(spec, plan, chdir=Path("/code"), output=Path("/logs/%j.log"), folder=folder)
    return re.sub(r"dtctl [0-9.]+", "dtctl VERSION", made)


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_as_kept(case: str) -> None:
    found, kept = made(CASES[case], FOLDERS.get(case)), HERE / "sbatch" / f"{case}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(found)
    assert found == kept.read_text()


@pytest.mark.parametrize("case", CASES)
def test_bash_reads_it(case: str, tmp_path: Path) -> None:
    (tmp_path / "job").write_text(made(CASES[case], FOLDERS.get(case)))
    done = subprocess.run(["bash", "-n", tmp_path / "job"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("slurm: {time: tomorrow}", "'tomorrow' is not a time limit of Slurm"),
        ("slurm: {extra: {'a b': 1}}", "'a b' cannot be an option of sbatch"),
        ('slurm: {partition: "a\\nb"}', "cannot stand in a line of a batch file"),
    ],
)
def test_what_cannot_be_said_to_slurm(more: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        made(NODES + "job: {script: a.py}\n" + more)
