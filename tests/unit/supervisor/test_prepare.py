"""What a node checks before any of them starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtctl.supervisor import messages
from dtctl.supervisor.main import Stop, prepare
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
    asked = messages.Prepare(run="r", fresh=True, cwd=str(tmp_path / cwd), pushed=False, files=[file], programs=[])
    with pytest.raises(Stop) as stopped:
        prepare(str(tmp_path), asked)
    assert stopped.value.code == code
    assert not missing(str(stopped.value).replace("/", " "), facts)
