"""Answers of the machine that has Slurm's commands: of a folder of the user's own under Slurm, and of a job."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from dtctl.slurm import remote_commands
from dtctl.slurm.answers import JobStatus
from dtctl.slurm.leftover_processes import end_left_processes
from dtctl.slurm.site import LocalCommandHost
from dtctl.supervisor import slurm_commands


def fill(folder: Path, code: Path) -> dict[str, object]:
    return slurm_commands.fill_run_folder({
        "folder": str(folder), "code": str(code), "pushed": False, "binary": {}, "files": {}, "folders": [],
        "outputs": [], "earlier": "",
    })  # fmt: skip


def test_a_folder_that_is_not_pushed_is_copied_without_dtctl_s_records(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "pkg").mkdir(parents=True)
    (code / "train.py").write_text("a")
    (code / ".dtctl").mkdir()
    (tmp_path / "data").write_text("data")
    (code / "pkg" / "data").symlink_to("../../data")
    (code / "pkg" / "here").symlink_to("../train.py")
    folder = code / "work" / "slurm" / "run"
    fill(folder, code)
    top = folder / "work"
    assert sorted(path.name for path in top.iterdir()) == ["pkg", "train.py", "work"]
    assert list((top / "work").iterdir()) == []
    assert (top / "pkg" / "data").read_text() == "data"
    assert (top / "pkg" / "here").readlink() == Path("../train.py")


def test_what_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "large").touch()
    os.truncate(tmp_path / "code" / "large", 2 << 30)  # a hole
    assert "job.files.root" in str(fill(tmp_path / "one", tmp_path / "code")["error"])
    assert "does not exist" in str(fill(tmp_path / "two", tmp_path / "nowhere")["error"])


@pytest.mark.parametrize(
    ("node_list", "restarts", "total"),
    [("", "0", 0), ("(null)", "0", 0), ("", "1", None), ("(null)", "1", None)],
    ids=["nothing", "null", "nothing, restarted", "null, restarted"],
)
def test_a_job_that_was_never_given_a_node_has_left_nothing(
    tmp_path: Path, node_list: str, restarts: str, total: int | None
) -> None:
    """Slurm 22.05 writes nothing for the nodes of a job that was cancelled in the queue; others write (null)."""
    line = (
        f"JobId=7 JobName=x JobState=CANCELLED Reason=None Restarts={restarts} ReqNodeList=(null) NodeList={node_list} "
    )
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho {shlex.quote(line)}\n")
    scontrol.chmod(0o755)
    site = LocalCommandHost(env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    state = remote_commands.send_login_request(site, sys.executable, JobStatus, job="7").job
    assert (state.state, state.nodes) == ("CANCELLED", [])
    assert end_left_processes(site, sys.executable, "7", state, state.nodes).total == total
