"""A save that is killed, and a loop of one's own that is killed in one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from dtctl.runtime.snapshot import commands, read, write
from tests import forked

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
PARTS = {"model": {"w": torch.ones(9)}, "random": {"r": torch.ones(9)}}
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from dtctl.runtime.snapshot import write

calls, fsync = 0, os.fsync
def counted(descriptor):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = counted
parts = {"model": {"w": torch.ones(9)}, "random": {"r": torch.ones(9)}}
write.save_snapshot_parts(Path(sys.argv[1]), 2, parts, facts={}, keep=1)
print(calls)
"""


def test_killed_anywhere_in_a_save(tmp_path: Path) -> None:
    """SIGKILL at each point where the writer waits for the disk; the last call number is one that never comes."""
    (tmp_path / "save.py").write_text(KILLED)
    for point in (1, 3, 5, 6, 7):
        folder = tmp_path / str(point)
        write.save_snapshot_parts(folder, 1, PARTS, facts={}, keep=1)
        ended = forked.launch(["save.py", folder, str(point)], 1, cwd=tmp_path)
        assert ended.code == (0 if point == 7 else 1), ended.output
        assert ("rank 0 ended by SIGKILL" in ended.output) == (point < 7)
        good, rejected = read.find_newest_good(folder)
        assert good is not None
        assert rejected == []
        assert good.step == (2 if point >= 6 else 1)  # renamed, and only then made durable
        write.save_snapshot_parts(folder, 3, PARTS, facts={}, keep=1)
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]


def test_a_loop_of_ones_own_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def train(folder: Path) -> str:
        ended = forked.launch([ROOT / "examples" / "own_loop.py", folder], 1, cwd=tmp_path)
        assert ended.code == 0, ended.output
        return ended.output

    assert train(tmp_path / "straight") == ""
    shutil.copytree(tmp_path / "straight", tmp_path / "killed")
    (tmp_path / "killed" / "step-00000060" / "COMMIT").unlink()
    assert train(tmp_path / "killed") == "going on from step 40 step-00000060 is incomplete: COMMIT is missing\n"
    digests = {commands.compute_snapshot_digest(tmp_path / name)["digest"] for name in ("straight", "killed")}
    assert len(digests) == 1
