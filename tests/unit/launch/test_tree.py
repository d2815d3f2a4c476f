"""The tree and its digest."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtctl.errors import PlanError
from dtctl.launch.files import tree as module
from dtctl.launch.files.push_selection import SelectedFile, TreeWalk
from dtctl.launch.files.tree import DigestCache, scan_push_tree
from dtctl.supervisor.receive import LINK_MODE
from tests.facts import raises


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text("print('hello')\n")
    (root / "pkg" / "__init__.py").touch()
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    return root


def entry(root: Path, path: str) -> module.TreeFile:
    return {os.fsdecode(entry.path): entry for entry in scan_push_tree(root).files}[path]


def test_files_come_in_the_order_of_their_paths_with_what_matters_of_their_modes(project: Path) -> None:
    tree = scan_push_tree(project)
    assert [(e.path, e.mode, e.size) for e in tree.files] == [
        (b"pkg/__init__.py", 0o600, 0),
        (b"run.sh", 0o700, 10),
        (b"train.py", 0o600, 15),
    ]
    assert tree.total_bytes == 25
    assert (tree.root, tree.withheld, tree.skipped) == (project, (), ())


def rename(root: Path) -> None:
    (root / "train.py").rename(root / "main.py")


CHANGES: dict[str, Callable[[Path], object]] = {
    "contents": lambda root: (root / "train.py").write_text("print('HELLO')\n"),
    "name": rename,
    "mode": lambda root: (root / "train.py").chmod(0o755),
    "new file": lambda root: (root / "new").touch(),
    "new link": lambda root: (root / "new").symlink_to("train.py"),
    "removed": lambda root: (root / "train.py").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_changes_the_digest(project: Path, change: str) -> None:
    before = scan_push_tree(project).digest
    CHANGES[change](project)
    assert scan_push_tree(project).digest != before


def test_the_digest_does_not_depend_on_place_and_time(project: Path) -> None:
    before = scan_push_tree(project).digest
    os.utime(project / "train.py", (1, 1))
    (project / "train.py").chmod(0o644)
    (project / "empty folder").mkdir()
    assert scan_push_tree(project.rename(project.with_name("elsewhere"))).digest == before


def test_a_file_and_a_link_of_the_same_text_are_different(project: Path) -> None:
    (project / "x").write_text("train.py")
    before = scan_push_tree(project).digest
    (project / "x").unlink()
    (project / "x").symlink_to("train.py")
    assert scan_push_tree(project).digest != before


@pytest.mark.parametrize(
    ("path", "target", "expected"),
    [
        ("latest", "train.py", b"train.py"),
        ("latest", "./pkg/", b"pkg"),
        ("pkg/up", "..", b".."),
        ("pkg/up", "../train.py", b"../train.py"),
        ("latest", "{root}/train.py", b"train.py"),
        ("pkg/up", "{root}/train.py", b"../train.py"),
        ("latest", "../project/train.py", b"train.py"),
        ("latest", "through/../train.py", b"train.py"),
        ("latest", "through/__init__.py", b"pkg/__init__.py"),
        ("latest", "through", b"through"),
        ("latest", ".", b"."),
    ],
)
def test_a_link_that_stays_inside_is_kept(project: Path, path: str, target: str, expected: bytes) -> None:
    (project / "through").symlink_to("pkg")
    (project / path).symlink_to(target.format(root=project))
    assert entry(project, path)[:3] == (os.fsencode(path), LINK_MODE, len(expected))
    assert entry(project, path).link == expected


@pytest.mark.parametrize("target", ["/usr", "..", "../other", "pkg/../../other"])
def test_a_link_that_leaves_the_tree_is_refused(project: Path, target: str) -> None:
    project.with_name("other").mkdir()
    (project / "data").symlink_to(target)
    with raises(PlanError, "data outside") as caught:
        scan_push_tree(project)
    assert caught.value.where == str(project / "data")
    assert ".dtctlignore" in str(caught.value.hint)
    (project / ".dtctlignore").write_text("data\n")
    assert len(scan_push_tree(project).files) == 4


@pytest.mark.parametrize("target", ["nowhere", "loop", "/nowhere/at/all"])
def test_a_link_that_leads_nowhere_is_left_out_and_reported(project: Path, target: str) -> None:
    (project / "loop").symlink_to(target)
    tree = scan_push_tree(project)
    assert tree.skipped == ("loop",)
    assert len(tree.files) == 3


def test_the_root_may_be_a_link(project: Path) -> None:
    project.with_name("here").symlink_to("project")
    (project / "inside").symlink_to(project / "train.py")
    assert scan_push_tree(project.with_name("here")).digest == scan_push_tree(project).digest


def test_a_private_key_is_withheld_whatever_its_name(project: Path) -> None:
    (project / "deploy").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n")
    tree = scan_push_tree(project, include=["*"])
    assert tree.withheld == ("deploy",)
    assert b"deploy" not in {e.path for e in tree.files}
    asked = scan_push_tree(project, include=["deploy"])
    assert asked.withheld == ()
    assert b"deploy" in {e.path for e in asked.files}


def test_a_key_that_was_asked_for_once_is_withheld_the_next_time(project: Path, tmp_path: Path) -> None:
    (project / "deploy").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n")
    cache = tmp_path / "cache"
    for include, expected in (["deploy"], ()), ([], ("deploy",)), (["deploy"], ()), ([], ("deploy",)):
        assert scan_push_tree(project, include=include, cache=cache).withheld == expected


def test_two_roots_share_a_cache_folder(project: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert scan_push_tree(project, cache=cache).digest == scan_push_tree(project).digest
    assert scan_push_tree(project / "pkg", cache=cache).digest == scan_push_tree(project / "pkg").digest
    assert len(list(cache.iterdir())) <= 2


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with raises(PlanError, "exist"):
        scan_push_tree(tmp_path / "none")


@pytest.mark.parametrize("limit", ["MAX_BYTES", "MAX_FILES"])
def test_far_too_much_is_refused_and_the_largest_folders_are_named(
    project: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "data").mkdir()
    for number in range(20):
        (project / "data" / f"{number}.bin").write_bytes(b"x" * 1000)
    monkeypatch.setattr(module, limit, 10)
    with raises(PlanError, "push") as caught:
        scan_push_tree(project)
    assert "data (20 files" in str(caught.value.hint)
    assert ".dtctlignore" in str(caught.value.hint)


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder that everybody may enter, with the rights of somebody who may not read everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        uid = os.geteuid()
        yield folder
        os.seteuid(uid)


def test_a_file_that_cannot_be_read_is_named(as_nobody: Path) -> None:
    (as_nobody / "notes.bin").touch(mode=0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    with raises(PlanError, "Permission denied") as caught:
        scan_push_tree(as_nobody)
    assert caught.value.where == str(as_nobody / "notes.bin")


def test_a_file_that_goes_away_during_the_scan_was_never_there(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = module._build_tree_file

    def remove_first(walk: TreeWalk, file: SelectedFile, digests: DigestCache) -> module.TreeFile | None:
        if file.path == b"train.py":
            (project / "train.py").unlink()
        return entry(walk, file, digests)

    monkeypatch.setattr(module, "_build_tree_file", remove_first)
    assert [e.path for e in scan_push_tree(project).files] == [b"pkg/__init__.py", b"run.sh"]
