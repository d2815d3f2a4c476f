"""`dtctl sandbox down`: the runs whose files it deletes."""

from __future__ import annotations

from pathlib import Path

import pytest

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
