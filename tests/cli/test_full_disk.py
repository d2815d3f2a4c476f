"""What a full disk refuses is told by the exit code, and leaves nothing half-written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DTCTL = [sys.executable, "-m", "dtctl"]


FULL = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *DTCTL]
"""As on a full disk: a file may not grow."""


@pytest.mark.parametrize("words", [["lint", "--list"], ["nccl", "explain", "NCCL_DEBUG"]])
def test_what_could_not_be_shown_is_no_success(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*DTCTL, *words], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 7, done.stderr


def test_a_project_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for folder in ("new", "there"):
        done = subprocess.run([*FULL, "init", folder], cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 2, done.stderr
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["there"]


def test_a_batch_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text(
        "cluster: {transport: slurm, nodes: 1, slots: 1}\njob: {script: t.py, kind: direct}\n"
    )
    (tmp_path / "t.py").write_text("")
    done = subprocess.run([*FULL, "sbatch", "--out", "job.sbatch"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 2, done.stderr
    assert not (tmp_path / "job.sbatch").exists()
