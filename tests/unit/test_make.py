"""What `make demo` installs: what it needs, and nothing for the tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[2]


def setup(folder: Path, purpose: str) -> str:
    """What .ci/setup.sh says where no package is there and nobody may install any."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, text in {"id": "echo 1000", "python3": "exit 1"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    script = (ROOT / ".ci" / "setup.sh").read_text()
    script = script.replace('[ -e "$path" ] || ', "").replace('command -v "${path##*/}"', "false")
    (folder / ".ci").mkdir(exist_ok=True)
    (folder / ".ci" / "setup.sh").write_text(script)
    env = {**os.environ, "PATH": f"{tools}:/usr/bin:/bin", "VENV": str(folder / "venv")}
    argv = ["bash", str(folder / ".ci" / "setup.sh"), purpose]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    return done.stderr


def test_the_demo_needs_neither_slurm_nor_a_browser(tmp_path: Path) -> None:
    demo, tests = setup(tmp_path, "demo"), setup(tmp_path, "dev")
    assert "openssh-server" in demo
    for package in ("slurmd", "munge", "chromium-headless-shell", "iperf3"):
        assert package not in demo
        assert package in tests


def test_make_demo_sets_up_for_the_demo_alone(tmp_path: Path) -> None:
    argv = ["make", "--dry-run", "demo", f"VENV={tmp_path}/venv"]
    told = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "setup.sh demo" in told
    assert told.count("setup.sh") == 1


def test_clean_removes_what_git_ignores(tmp_path: Path) -> None:
    """But for what Python compiled, and other environments."""
    argv = ["make", "--dry-run", "clean", f"VENV={tmp_path}/venv"]
    told = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    removed = {Path(word).name for word in told.split() if not word.startswith("-")}
    ignored = {Path(line).name for line in (ROOT / ".gitignore").read_text().split()}
    assert ignored - {".venv*", "__pycache__", "*.egg-info"} <= removed


def test_the_modules_that_are_tested_first_exist() -> None:
    there = {path.stem for folder in ("integration", "fault") for path in (ROOT / "tests" / folder).glob("test_*.py")}
    assert set(LONGEST) <= there
    assert len(set(LONGEST)) == len(LONGEST)
