"""What the way to the nodes of a spec takes of this machine."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl.launch.cluster import choose_client
from dtctl.spec.model import SshClient


@pytest.mark.parametrize(
    ("asked", "has_ssh", "chosen"),
    [
        ("auto", True, "openssh"),
        ("auto", False, "paramiko"),
        ("paramiko", True, "paramiko"),
        ("openssh", False, "openssh"),
    ],
)
def test_nodes_are_reached_by_ssh_where_there_is_one(
    asked: SshClient, has_ssh: bool, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_ssh:
        (tmp_path / "ssh").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_client(asked) == chosen


LIMITED = """\
import os, resource, sys
from dtctl.errors import LaunchError
from dtctl.launch.cluster import _allow_open_files, _allow_processes
limit, allow = (resource.RLIMIT_NOFILE, _allow_open_files) if sys.argv[1] == "files" else (
    resource.RLIMIT_NPROC, _allow_processes)
soft, hard, nodes = map(int, sys.argv[2:])
if os.getuid() == 0:
    os.setuid(65534)  # root has no limit of processes
resource.setrlimit(limit, (soft, hard))
try:
    allow(nodes)
except LaunchError as exc:
    print("refused", exc.message)
else:
    print("allowed", resource.getrlimit(limit)[0])
"""


def run_limited(kind: str, soft: int, hard: int, nodes: int) -> str:
    limit = resource.RLIMIT_NOFILE if kind == "files" else resource.RLIMIT_NPROC
    allowed = resource.getrlimit(limit)[1]
    if allowed != resource.RLIM_INFINITY and allowed < hard:
        pytest.skip("this machine allows fewer")
    argv = [sys.executable, "-c", LIMITED, kind, str(soft), str(hard), str(nodes)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("soft", "hard", "nodes", "said"),
    [
        (256, 4096, 250, "allowed 1506"),
        (2048, 4096, 250, "allowed 2048"),
        (256, 1024, 250, "refused 250 nodes take 1506 open files, and this machine allows 1024"),
    ],
)
def test_the_limit_of_open_files_is_raised_or_told_before_the_start(
    soft: int, hard: int, nodes: int, said: str
) -> None:
    assert run_limited("files", soft, hard, nodes) == said


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (100, 4000, "allowed 4000"),
        (100, 700, "refused 250 nodes take 750 processes and threads, and this machine allows 700"),
    ],
)
def test_the_limit_of_processes_is_raised_or_told_before_the_start(soft: int, hard: int, said: str) -> None:
    assert run_limited("processes", soft, hard, 250) == said
