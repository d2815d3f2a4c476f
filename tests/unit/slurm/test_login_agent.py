"""What becomes of a folder of the user's own under Slurm: a copy for the run, or a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dtctl import slurm

AGENT = Path(slurm.__file__).with_name("login_agent.py")


def fill(folder: Path, code: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    request = {
        "op": "fill", "folder": str(folder), "code": str(code), "pushed": False, "files": {}, "folders": [],
        "outputs": [], "earlier": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(AGENT)], input=json.dumps(request), capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_folder_that_is_not_pushed_is_copied_without_dtctl_s_records(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "pkg").mkdir(parents=True)
    (code / "train.py").write_text("a")
    (code / ".dtctl").mkdir()
    (tmp_path / "data").write_text("data")
    (code / "pkg" / "data").symlink_to("../../data")
    (code / "pkg" / "here").symlink_to("../train.py")
    folder = code / "work" / "slurm" / "run"
    assert fill(folder, code) == {}
    top = folder / "work"
    assert sorted(path.name for path in top.iterdir()) == ["pkg", "train.py", "work"]
    assert list((top / "work").iterdir()) == []
    assert (top / "pkg" / "data").read_text() == "data"
    assert (top / "pkg" / "here").readlink() == Path("../train.py")


def test_what_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "large").touch()
    os.truncate(tmp_path / "code" / "large", 2 << 30)  # a hole
    assert "job.files.root" in fill(tmp_path / "one", tmp_path / "code")["error"]
    assert "does not exist" in fill(tmp_path / "two", tmp_path / "nowhere")["error"]
