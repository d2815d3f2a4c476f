"""Files that hold a job's environment are for this user alone, whatever the umask, and whatever was there before."""

from __future__ import annotations

import os
import subprocess
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tests import command_line

SPEC = (
    "cluster: {nodes: [a, b], slots: 1, transport: ssh}\njob: {script: t.py, kind: direct, env: {WHO: nobody-else}}\n"
)
COMMANDS: dict[str, list[str]] = {
    "sbatch": ["sbatch", "--out", "out/job.sbatch"],
    "scripts": ["launch", "--out", "out"],
    "kubernetes": ["render", "--target", "kubernetes", "--set", "kubernetes.image=x/y:1", "--out", "out/job.yaml"],
    "report": ["report", "--out", "out/page.html"],
    "records": ["launch", "--no-doctor", "--set", "cluster.transport=local", "--set", "cluster.nodes=[]"],
}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"XDG_STATE_HOME": str(folder / "state")}
    return command_line.dtctl(*words, cwd=folder, env=env, before=partial(os.umask, 0))


def contents(path: Path) -> bytes:
    """Of a file; of a zip, those of the files in it."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return b"".join(map(archive.read, archive.namelist()))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("before", [None, 0o600])
def test_nobody_else_can_read_what_holds_the_environment(tmp_path: Path, command: str, before: int | None) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "out").mkdir(mode=0o700)
    (tmp_path / "t.py").write_text("")
    (tmp_path / "dtctl.yaml").write_text(SPEC)
    if before is not None:
        for name in ("job.sbatch", "job.launcher.zip", "a.sh", "job.yaml", "page.html"):
            (tmp_path / "out" / name).touch(before)
    words = COMMANDS[command]
    if command == "report":
        run(tmp_path, *COMMANDS["records"])
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "dtctl.yaml"]
    holders = [path for path in holders if b"nobody-else" in contents(path)]
    assert holders
    assert {oct(path.stat().st_mode & 0o077) for path in holders} == {"0o0"}, holders


def test_a_batch_file_that_others_could_read_is_closed_before_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text(SPEC)
    (tmp_path / "job.sbatch").touch()
    (tmp_path / "job.sbatch").chmod(0o666)
    assert run(tmp_path, "sbatch", "--out", "job.sbatch").returncode == 0
    assert (tmp_path / "job.sbatch").stat().st_mode & 0o777 == 0o600
