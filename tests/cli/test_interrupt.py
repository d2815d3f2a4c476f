"""Ctrl-C at any moment, once or many times, ends a command with 130 and one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRESS = """
import os, signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["PRESS_AT"]:
            sys.meta_path.remove(self)
            for _ in range(int(os.environ["PRESSES"])):
                os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
"""
SPEC = """\
cluster: {{transport: local, workdir: "{folder}/node"}}
job: {{name: test, script: train.py, kind: direct}}
"""
MOMENTS = (
    "dtctl.cli", "dtctl.cli.main", "typer", "dtctl.cli.app", "dtctl.cli.launch", "dtctl.spec.load", "pydantic",
    "dtctl.launch.job_builder", "dtctl.launch.control.run", "dtctl.transport.local", "dtctl.cli.common.followed_run",
)  # fmt: skip


@pytest.mark.parametrize("presses", [1, 5])
@pytest.mark.parametrize("moment", MOMENTS)
def test_while_modules_are_imported(tmp_path: Path, moment: str, presses: int) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text(PRESS)
    (tmp_path / "dtctl.yaml").write_text(SPEC.format(folder=tmp_path))
    (tmp_path / "train.py").write_text("import time\ntime.sleep(1000)\n")
    env = {"PYTHONPATH": str(tmp_path / "own"), "PRESS_AT": moment, "PRESSES": str(presses)}
    done = subprocess.run(
        [sys.executable, "-m", "dtctl", "launch", "--no-doctor"],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert "stopped" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr


def test_whoever_ignores_it_is_not_stopped_by_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PRESS)
    env = {"PYTHONPATH": str(tmp_path), "PRESS_AT": "typer", "PRESSES": "1"}
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "dtctl", "--version"]
    done = subprocess.run(ignoring, env={**os.environ, **env}, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
