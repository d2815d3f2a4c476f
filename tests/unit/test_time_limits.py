"""A test that waits for ever fails, and the tests after it run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEARDOWN = """
import time, pytest

@pytest.fixture
def endless():
    yield
    time.sleep(1000)

def test_failing(endless):
    raise ValueError

def test_after():
    pass
"""
OUT_OF_REACH = """
import signal, time

def test_blocked():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(1000)
"""


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    argv = [sys.executable, "-m", "pytest", "-p", "tests.time_limits", "-p", "no:cacheprovider", "-c", os.devnull]
    argv += ["--rootdir", str(folder), "-o", "timeout=2", *options, "test_it.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_a_teardown_after_a_failure_has_an_end(tmp_path: Path) -> None:
    done = run(tmp_path, TEARDOWN)
    assert done.returncode == 1
    assert "1 error" in done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_what_no_signal_interrupts_ends_with_the_process(tmp_path: Path) -> None:
    done = run(tmp_path, OUT_OF_REACH, "-o", "timeout_grace=1")
    assert done.returncode == 1
    assert "in test_blocked" in done.stderr, "where it stood"
