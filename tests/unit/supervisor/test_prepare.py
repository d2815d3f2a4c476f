"""What a node checks before any of them starts anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtctl.supervisor import frames, processes
from dtctl.supervisor.messages.setup import Prepare
from dtctl.supervisor.requests import RequestFailed
from dtctl.supervisor.setup import check_start_conditions, list_running_runs
from tests.facts import missing


@pytest.mark.parametrize(
    ("cwd", "file", "code", "facts"),
    [
        ("nowhere", "train.py", "missing-folder", "nowhere exist"),
        ("train.py", "train.py", "missing-folder", "train.py folder"),
        (".", "other.py", "missing-there", "other.py exist"),
        (".", "data", "missing-there", "data file"),
    ],
)
def test_what_is_no_folder_or_file_is_not_said_to_be_absent(
    tmp_path: Path, cwd: str, file: str, code: str, facts: str
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "data").mkdir()
    asked = Prepare(run="r", fresh=True, cwd=str(tmp_path / cwd), pushed=False, files=[file], programs=[])
    with pytest.raises(RequestFailed) as stopped:
        check_start_conditions(str(tmp_path), asked)
    assert stopped.value.code == code
    assert not missing(str(stopped.value).replace("/", " "), facts)


def test_only_runs_whose_supervisor_lives_are_under_way(tmp_path: Path) -> None:
    me = {"pid": os.getpid(), "identity": processes.read_process_identity(os.getpid())}
    records = {
        "living": frames.encode_message(me),
        "of-another-process": frames.encode_message({**me, "identity": "before the reboot 1"}),
        "of-nobody": frames.encode_message({"pid": 1 << 22, "identity": ""}),
        "damaged": b"{",
    }
    for run, content in records.items():
        (tmp_path / run).mkdir()
        (tmp_path / run / processes.RECORD).write_bytes(content)
    (tmp_path / "without-any").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert list_running_runs(str(tmp_path)) == ["living"]
    assert list_running_runs(str(tmp_path / "nowhere")) == []
