"""`dtctl sandbox down` and `dtctl clean`: the runs whose files go with a sandbox."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from dtctl import folders
from tests.command_line import dtctl


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (1, "1 run: r1"),
        (5, "5 runs: r5, r4, r3, r2, r1"),
        (9, "9 runs: r9, r8, r7, r6, r5, r4 and 3 more"),
    ],
)
def test_runs_that_are_not_named_are_counted(tmp_path: Path, count: int, named: str) -> None:
    runs = tmp_path / "main" / "hosts" / "node1" / "home" / ".dtctl" / "node" / "runs"
    for number in range(1, count + 1):
        (runs / f"r{number}" / "work").mkdir(parents=True)
    done = dtctl("sandbox", "down", "--name", "main", cwd=tmp_path, env={"DTCTL_SANDBOX_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == f"this also deletes what its hosts have of {named}"
    assert not runs.exists()


def test_a_sandbox_with_runs_of_other_folders_is_not_cleaned_with_the_rest(tmp_path: Path) -> None:
    project, sandboxes = tmp_path / "project", tmp_path / "sandboxes"
    project.mkdir()
    for name in ("empty", "theirs"):
        (sandboxes / name / "hosts").mkdir(parents=True)
        assert folders.mark_own_folder(str(sandboxes / name), lambda name: name == "hosts")
    (sandboxes / "theirs" / "hosts" / "node1" / "home" / ".dtctl" / "node" / "runs" / "r" / "work").mkdir(parents=True)
    clean = partial(dtctl, "clean", "--older", "0s", "--yes", cwd=project, env={"DTCTL_SANDBOX_DIR": str(sandboxes)})
    done = clean()
    assert (done.returncode, "`--yes --others` removes" in done.stderr) == (0, True), done.stderr
    assert [path.name for path in sandboxes.iterdir()] == ["theirs"]
    assert clean("--others").returncode == 0
    assert not [*sandboxes.iterdir()]
