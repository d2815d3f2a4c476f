"""`dtctl nccl explain`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("NCCL_SOCKET_IFNAME", 0, "default: ib*"),
        ("nccl_timeout", 0, "use instead: init_process_group"),
        ("NCCL_SOCKET_IFNAM", 2, "did you mean NCCL_SOCKET_IFNAME?"),
    ],
)
def test_a_variable_is_explained(tmp_path: Path, name: str, code: int, said: str) -> None:
    argv = [sys.executable, "-m", "dtctl", "nccl", "explain", name]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
