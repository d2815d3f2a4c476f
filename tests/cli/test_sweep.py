"""`dtctl launch --sweep`: one run after another, told apart by what was changed."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from dtctl.cli.common.sweep import parse_sweep
from dtctl.errors import UsageError
from tests.command_line import dtctl
from tests.facts import missing, raises

PROGRAM = """\
import json, os, sys
rate, seed = sys.argv[2], os.environ["SEED"]
if rate == "3":
    sys.exit(5)
with open(os.environ["DTCTL_METRICS"], "w") as file:
    file.write(json.dumps({"step": 10, "loss": float(rate) + float(seed), "time": 1.0}) + "\\n")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "dtctl.yaml").write_text(
        f"cluster: {{slots: 1, workdir: {tmp_path}/node}}\n"
        "job: {name: s, script: train.py, kind: direct, args: [--lr, '0'], env: {SEED: '0'}}\n"
    )
    return tmp_path


def test_each_combination_is_a_run(folder: Path) -> None:
    done = dtctl(
        "launch", "--sweep", "job.args=[--lr,1],[--lr,3]", "--sweep", "job.env.SEED=4,5", "--name", "s", cwd=folder
    )
    assert done.returncode == 8, done.stderr  # of the first run that has failed; those after it were launched
    assert not missing(done.stdout, "s-1 4 succeeded 10 5.0000")
    assert not missing(done.stdout, "s-2 5 succeeded 10 6.0000")
    assert not missing(done.stdout, "s-3 4 exit code 8")
    assert not missing(done.stdout, "s-4 5 exit code 8")
    listed = json.loads(dtctl("runs", "--json", cwd=folder).stdout)["runs"]
    assert [row["sweep"]["job.env.SEED"] for row in listed] == ["4", "5", "4", "5"]
    begins, lengths = [row["started"] for row in listed], [row["duration_s"] for row in listed]
    for run, begun, length, following in zip(listed, begins, lengths, [*begins[1:], time.time()], strict=True):
        assert 0 < length < following - begun + 0.1, "one run begins after the end of the one before it"
        ledger = json.loads((folder / ".dtctl" / "runs" / run["run"] / "ledger.json").read_text())
        assert ledger["wall_s"] < following - begun + 0.1
    starts = [float(text) for text in re.findall(r"started on 1 node after (\S+) s", done.stderr)]
    assert len(starts) == 4
    assert all(start < length + 0.1 for start, length in zip(starts, lengths, strict=True))
    assert "job.env.SEED" in dtctl("runs", cwd=folder).stdout


def test_a_wrong_value_is_found_before_the_first_run(folder: Path) -> None:
    done = dtctl("launch", "--sweep", "job.max_restarts=0,many", cwd=folder)
    assert done.returncode == 3
    assert not (folder / ".dtctl" / "runs").exists()
    shown = dtctl("launch", "--dry-run", "--sweep", "job.max_restarts=0,1", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    assert not missing(shown.stdout, "job.max_restarts STATUS")
    assert dtctl("launch", "--sweep", "job.max_restarts=0,1", "-d", cwd=folder).returncode == 2


def test_values_are_taken_as_they_are_written() -> None:
    assert parse_sweep(["train.lr=1e-3,3e-3", "train.betas=[0.9, 0.95],[0.8,0.9]"]) == [
        {"train.lr": "1e-3", "train.betas": "[0.9, 0.95]"},
        {"train.lr": "1e-3", "train.betas": "[0.8,0.9]"},
        {"train.lr": "3e-3", "train.betas": "[0.9, 0.95]"},
        {"train.lr": "3e-3", "train.betas": "[0.8,0.9]"},
    ]
    assert parse_sweep(["job.args=['a,b',\"c\"]"]) == [{"job.args": "['a,b',\"c\"]"}]
    with raises(UsageError, "train.lr KEY=A,B"):
        parse_sweep(["train.lr"])
    with raises(UsageError, "train.lr twice"):
        parse_sweep(["train.lr=1", "train.lr=2"])
    with raises(UsageError, "10,000 1,000"):
        parse_sweep([f"{key}=0,1,2,3,4,5,6,7,8,9" for key in "abcd"])
