"""What a full disk refuses is told by the exit code, and leaves nothing half-written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl.cli import main

DTCTL = [sys.executable, "-m", "dtctl"]


FULL = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *DTCTL]
"""As on a full disk: a file may not grow."""


@pytest.mark.parametrize("words", [["lint", "--list"], ["nccl", "explain", "NCCL_DEBUG"], ["--help"]])
def test_what_could_not_be_shown_is_no_success(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*DTCTL, *words], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 7, done.stderr
    assert b"Traceback" not in done.stderr


def test_a_full_disk_elsewhere_is_not_taken_for_that_of_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    """An error of a file that is open has no name either."""
    code = main._report_other_error(OSError(errno.ENOSPC, "No space left on device"), ["init"], has_rest=False)
    printed = capsys.readouterr().err
    assert (code, "standard output" in printed, "No space left on device" in printed) == (1, False, True)


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


SPEC = "cluster: {transport: slurm, nodes: 1, slots: 1}\njob: {script: t.py, kind: direct}\n"


def test_a_folder_in_place_of_the_batch_file_leaves_no_launcher_beside_it(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text(SPEC)
    (tmp_path / "t.py").write_text("")
    (tmp_path / "job.sbatch").mkdir()
    done = subprocess.run([*DTCTL, "sbatch", "--out", "job.sbatch"], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, b"Is a directory" in done.stderr) == (2, True), done.stderr
    assert list(tmp_path.glob("*.zip")) == []


def test_a_batch_file_without_its_launcher_is_removed(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text(SPEC)
    (tmp_path / "t.py").write_text("")
    (tmp_path / "job.launcher.zip").mkdir()
    done = subprocess.run([*DTCTL, "sbatch", "--out", "job.sbatch"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 2, done.stderr
    assert not (tmp_path / "job.sbatch").exists()


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ('[ -z "$CONDA_BACKUP" ] && true', 73, b"does not see"),
        ("false", 1, b"this line of job.setup has failed: false"),
    ],
    ids=["a variable that is not set", "a line that fails"],
)
def test_the_set_up_in_a_batch_file(tmp_path: Path, line: str, code: int, words: bytes) -> None:
    """Files of conda and of modules read variables that are not set."""
    (tmp_path / "dtctl.yaml").write_text(SPEC.replace("kind: direct", f"kind: direct, setup: ['{line}']"))
    (tmp_path / "t.py").write_text("")
    subprocess.run([*DTCTL, "sbatch", "--out", "job.sbatch"], cwd=tmp_path, capture_output=True, check=True)
    (tmp_path / "job.launcher.zip").write_bytes(b"another one")
    env = {**os.environ, "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "job.sbatch"], cwd=tmp_path, capture_output=True, check=False, env=env)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
