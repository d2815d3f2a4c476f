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
import resource, sys
from dtctl.errors import LaunchError
from dtctl.launch.cluster import _allow_open_files
soft, hard, nodes = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    _allow_open_files(nodes)
except LaunchError as exc:
    print("refused", exc.message)
else:
    print("allowed", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


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
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip("this machine allows fewer")
    argv = [sys.executable, "-c", LIMITED, str(soft), str(hard), str(nodes)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip() == said
