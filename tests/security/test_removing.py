"""Removing: nothing but what is ours, never through a link and never into something that is mounted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtctl import folders
from dtctl.errors import SandboxError
from dtctl.sandbox import control
from tests.facts import raises


def kept(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "mine").write_text("mine")
    return folder / "inner" / "mine"


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a sandbox that went down without removing it."""
    monkeypatch.setenv("DTCTL_SANDBOX_DIR", str(tmp_path / "sandboxes"))
    state = tmp_path / "sandboxes" / "one"
    (state / "hosts" / "node1" / "home").mkdir(parents=True)
    (state / "sandbox.json").write_text("{}")
    return state


def test_a_folder_that_is_no_sandbox_is_not_emptied(tmp_path: Path, sandbox: Path) -> None:
    mine = kept(sandbox.parent / "projects")
    with raises(SandboxError, "belong sandbox"):
        control.remove_sandbox("projects")
    with raises(SandboxError, "belong sandbox"):
        control.start_sandbox("projects", nodes=1)
    assert mine.read_text() == "mine"
    mine = kept(tmp_path / "elsewhere")
    (sandbox.parent / "linked").symlink_to(mine.parent.parent)
    with raises(SandboxError, "belong sandbox"):
        control.remove_sandbox("linked")
    assert mine.read_text() == "mine"


def test_links_in_a_hosts_home_are_removed_and_not_followed(tmp_path: Path, sandbox: Path) -> None:
    mine = kept(tmp_path / "data")
    (sandbox / "hosts" / "node1" / "home" / "data").symlink_to(mine.parent)
    assert control.remove_sandbox("one")
    assert not sandbox.exists()
    assert mine.read_text() == "mine"


@pytest.mark.skipif(os.getuid() != 0, reason="needs to mount")
def test_what_is_mounted_in_a_hosts_home_stays(tmp_path: Path, sandbox: Path) -> None:
    mine, inside = kept(tmp_path / "data"), sandbox / "hosts" / "node1" / "home" / "data"
    inside.mkdir()
    subprocess.run(["mount", "--bind", mine.parent, inside], check=True)
    try:
        with raises(SandboxError, "mounted") as caught:
            control.remove_sandbox("one")
        assert caught.value.where == str(inside)
        assert mine.read_text() == "mine"
    finally:
        subprocess.run(["umount", inside], check=True)
    assert control.remove_sandbox("one")
    assert not sandbox.exists()


def test_a_folder_with_a_foreign_file_is_not_marked_as_ours(tmp_path: Path) -> None:
    (tmp_path / "foreign").touch()
    assert not folders.mark_own_folder(str(tmp_path), lambda name: name == "ours")
    (tmp_path / "foreign").rename(tmp_path / "ours")
    assert folders.mark_own_folder(str(tmp_path), lambda name: name == "ours")
    (tmp_path / "foreign").touch()
    assert folders.mark_own_folder(str(tmp_path), lambda name: name == "ours"), "once marked, it stays so"


def test_a_link_is_no_marker(tmp_path: Path) -> None:
    (tmp_path / folders.MARKER).symlink_to("/etc/passwd")
    (tmp_path / "mine").touch()
    assert not folders.mark_own_folder(str(tmp_path), lambda name: name == "ours")


@given(st.recursive(st.sampled_from(["file", "link out", "link in"]), lambda inner: st.lists(inner, max_size=4)))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_tree_has_it_goes_and_nothing_else(tmp_path: Path, shape: object) -> None:
    mine = tmp_path / "kept"
    mine.mkdir(exist_ok=True)
    (mine / "mine").write_text("mine")

    def make(path: Path, what: object) -> None:
        if isinstance(what, list):
            path.mkdir()
            for index, inner in enumerate(what):
                make(path / str(index), inner)
        elif what == "file":
            path.touch()
        else:
            path.symlink_to(mine if what == "link out" else tmp_path)

    make(tmp_path / "gone", shape)
    assert folders.remove_folder_tree(str(tmp_path / "gone")) == []
    assert not os.path.lexists(tmp_path / "gone")
    assert (mine / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/x", "a\0b", "a\nb", "x" * 256, "\x1b[2J", 7, None])
def test_what_is_no_name_of_a_file_is_not_made(tmp_path: Path, name: object) -> None:
    folder = folders.open_folder(str(tmp_path))
    try:
        with pytest.raises(ValueError):
            folders.create_in(folder, name)  # type: ignore[arg-type]
    finally:
        os.close(folder)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_or_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    folder = folders.open_folder(str(tmp_path))
    try:
        for name in ("there", "link"):
            with pytest.raises(FileExistsError):
                folders.create_in(folder, name)
    finally:
        os.close(folder)
    assert (tmp_path / "there").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()
