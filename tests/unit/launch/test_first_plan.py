"""How many cores may be used, where a control group grants less than the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtctl.launch.first_plan import usable_cores


def cgroups(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    root, own = folder / "cgroup", folder / "self"
    root.mkdir()
    own.write_text(membership)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root, own


@pytest.fixture(autouse=True)
def sixty_four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {}, 64),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b\n", {"cpu.max": "400000 100000\n", "a/cpu.max": "800000 100000\n", "a/b/cpu.max": "max 1\n"}, 4),
        ("0::/../../elsewhere\n", {"cpu.max": "300000 100000\n"}, 3),
        (
            "4:memory:/m\n3:cpu,cpuacct:/docker/x\n",
            {"cpu/docker/x/cpu.cfs_quota_us": "150000\n", "cpu/docker/x/cpu.cfs_period_us": "50000\n"},
            3,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, membership: str, files: dict[str, str], cores: int) -> None:
    assert usable_cores(*cgroups(tmp_path, membership, files)) == cores


def test_without_control_groups(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "none") == 64
