"""`dtctl snapshot` on a folder and on a run: what is damaged is named, with exit code 10."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import command_line

pytestmark = pytest.mark.torch

MAKE = """
import sys, torch
from pathlib import Path
from dtctl.runtime.snapshot import write
for step in (5, 10):
    parts = {"model": {"w": torch.full((4,), float(step))}, "optimizer": {"state": {}, "groups": []}}
    write.save_snapshot_parts(Path(sys.argv[1]), step, parts, facts={}, keep=9)
"""
JOB = """
import os, shutil
shutil.copytree("made", os.environ["DTCTL_SNAPSHOT_DIR"])
"""


def dtctl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return command_line.dtctl(*arguments, cwd=cwd, env={"NO_COLOR": "1"})


def test_a_folder_and_a_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    subprocess.run([sys.executable, "-c", MAKE, str(made)], check=True)
    (tmp_path / "t.py").write_text(JOB)
    node = tmp_path / "node"
    (tmp_path / "dtctl.yaml").write_text(
        f"cluster: {{slots: 1, workdir: {node}, python: {sys.executable}}}\n"
        "job: {script: t.py, kind: direct, setup: [echo chatter]}\n"
    )
    assert dtctl("snapshot", "ls", cwd=tmp_path).returncode == 7
    assert dtctl("snapshot", "ls", "nothing", cwd=tmp_path).returncode == 10
    launched = dtctl("launch", "--name", "one", cwd=tmp_path)
    assert launched.returncode == 0, launched.stderr

    on_folder = dtctl("snapshot", "digest", "made", "--json", cwd=tmp_path)
    on_run = dtctl("snapshot", "digest", "one", "--json", cwd=tmp_path)
    assert json.loads(on_folder.stdout) == json.loads(on_run.stdout), on_run.stderr
    assert json.loads(on_run.stdout).keys() == {"step", "digest"}
    rows = json.loads(dtctl("snapshot", "ls", "--json", cwd=tmp_path).stdout)["snapshots"]
    assert [(row["step"], row["node"]) for row in rows] == [(10, "localhost"), (5, "localhost")]

    (Path(rows[0]["path"]) / "model.safetensors").write_bytes(b"")
    verified = dtctl("snapshot", "verify", "one", "--json", cwd=tmp_path)
    assert verified.returncode == 10
    found = json.loads(verified.stdout)
    assert [row["status"] for row in found["snapshots"]] == ["corrupt", "ok"]
    assert found["newest_good"] == rows[1]["path"]
    assert dtctl("snapshot", "verify", "made", cwd=tmp_path).returncode == 0

    exported = dtctl("snapshot", "export", "one", "-o", "w.safetensors", "--json", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert json.loads(exported.stdout)["step"] == 5
    local = dtctl("snapshot", "export", rows[1]["path"], "-o", "x.safetensors", cwd=tmp_path)
    assert local.returncode == 0, local.stderr
    assert (tmp_path / "w.safetensors").read_bytes() == (tmp_path / "x.safetensors").read_bytes()
    for verb in ("show", "digest", "ls"):
        assert dtctl("snapshot", verb, "one", cwd=tmp_path).returncode == 0
    assert dtctl("snapshot", "prune", "one", cwd=tmp_path).returncode == 0
    rows = json.loads(dtctl("snapshot", "ls", "one", "--json", cwd=tmp_path).stdout)["snapshots"]
    assert [row["step"] for row in rows] == [5]
