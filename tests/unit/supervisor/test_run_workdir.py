"""The working folder is made once, found again by a later supervisor, and never the pushed tree itself."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dtctl.supervisor import run_workdir


def in_a_process(action: Callable[[], object]) -> None:
    """An overlay is seen by the process that has mounted it, and stays in no other."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code" / ("0" * 32)
    (folder / "pkg").mkdir(parents=True)
    rows = []
    for name, text in {"a.py": "a", "pkg/b.py": "b", "run.sh": "c"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700 if name == "run.sh" else 0o600)
        rows.append([name, (folder / name).stat().st_mode & 0o777, 1, "", "", 0, 0, 0])
    (folder / "link").symlink_to("pkg/b.py")
    rows.append(["link", run_workdir.LINK_MODE, 8, "", "pkg/b.py", 0, 0, 0])
    (tmp_path / "code" / f"{folder.name}.json").write_text(json.dumps({"files": rows}))
    return folder


@pytest.mark.parametrize("how", ["copy", "overlay"])
def test_what_was_written_is_there_for_the_next_supervisor(
    tmp_path: Path, code: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if how == "overlay":
        if os.geteuid() != 0:
            pytest.skip("only root mounts")
        monkeypatch.setattr(run_workdir, "MANY_ROWS_BYTES", 0)
    folder = run_dir / "work"

    def first() -> None:
        run_workdir.prepare_working_folder(str(run_dir), str(code), [], "")
        assert (folder / "link").read_text() == "b"
        assert (folder / "run.sh").stat().st_mode & 0o777 == 0o700
        (folder / "a.py").write_text("changed")
        (folder / "out").mkdir()
        (folder / "out" / "x").write_text("new")
        (folder / "pkg" / "b.py").unlink()

    def second() -> None:
        run_workdir.prepare_working_folder(str(run_dir), str(code), [], "")
        assert (folder / "a.py").read_text() == "changed"
        assert (folder / "out" / "x").read_text() == "new"
        assert (folder / "run.sh").read_text() == "c"
        assert not (folder / "pkg" / "b.py").exists()
        assert {path for path, _, _ in run_workdir.list_written_files(str(run_dir), [])} == {"a.py", "out/x"}

    in_a_process(first)
    assert json.loads((run_dir / "work.json").read_text())["how"] == how
    in_a_process(second)
    in_a_process(second)
    assert {path for path, _, _ in run_workdir.list_written_files(str(run_dir), [])} == {"a.py", "out/x"}, (
        "from outside, too"
    )
    assert ((code / "a.py").read_text(), (code / "pkg" / "b.py").read_text()) == ("a", "b")


def test_a_folder_that_was_not_finished_is_made_anew(tmp_path: Path, code: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "work" / "half").mkdir(parents=True)
    run_workdir.prepare_working_folder(str(run_dir), str(code), [], "")
    assert sorted(path.name for path in (run_dir / "work").iterdir()) == ["a.py", "link", "pkg", "run.sh"]


def test_a_run_without_a_tree_has_none(tmp_path: Path) -> None:
    assert run_workdir.find_working_folder(str(tmp_path)) == ""
    assert list(run_workdir.list_written_files(str(tmp_path), [])) == []


def test_what_lies_in_the_working_folder_already_is_the_code(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "work" / "pkg").mkdir(parents=True)
    (run_dir / "work" / "pkg" / "a.py").write_text("a")
    run_workdir.prepare_working_folder(str(run_dir), "", [], "")
    (run_dir / "work" / "new").write_text("new")
    assert {path for path, _, _ in run_workdir.list_written_files(str(run_dir), [])} == {"new"}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder that the user keeps on the node, with dtctl's records and the runs' folder in it."""
    folder = tmp_path / "own"
    (folder / "pkg").mkdir(parents=True)
    (folder / "a.py").write_text("a")
    (folder / "pkg" / "b.py").write_text("b")
    (folder / "empty" / "below").mkdir(parents=True)
    (folder / ".dtctl").mkdir()
    (folder / ".dtctl" / "record").write_text("")
    (tmp_path / "beside").write_text("beside")
    (folder / "pkg" / "out").symlink_to("../../beside")
    (folder / "pkg" / "in").symlink_to("../a.py")
    os.mkfifo(folder / "pipe")
    (folder / "runs" / "run").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("how", ["copy", "overlay"])
def test_a_folder_of_the_user_s_own_is_as_safe(own: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = own / "runs" / "run"
    if how == "overlay":
        if os.geteuid() != 0:
            pytest.skip("only root mounts")
        monkeypatch.setattr(run_workdir, "MANY_FILES", 0)
    folder = run_dir / "work"

    def begin() -> None:
        run_workdir.prepare_working_folder(str(run_dir), str(own), [], "", is_pushed=False)
        assert (folder / "pkg" / "out").read_text() == "beside"
        assert (folder / "pkg" / "in").read_text() == "a"
        (folder / "a.py").write_text("changed")
        (folder / "pkg" / "in").write_text("through a link")
        (folder / "new").write_text("new")

    in_a_process(begin)
    assert json.loads((run_dir / "work.json").read_text())["how"] == how
    assert {path for path, _, _ in run_workdir.list_written_files(str(run_dir), [])} == {"a.py", "new"}
    assert list(run_workdir.list_written_links(str(run_dir), [])) == []
    assert ((own / "a.py").read_text(), sorted(path.name for path in own.iterdir())) == (
        "a", [".dtctl", "a.py", "empty", "pipe", "pkg", "runs"],
    )  # fmt: skip
    if how == "copy":
        assert sorted(path.name for path in folder.iterdir()) == ["a.py", "empty", "new", "pkg"]
        assert (folder / "empty" / "below").is_dir()


def test_a_folder_that_is_too_large_to_be_copied_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_workdir, "MOST_COPIED_BYTES", 1)
    monkeypatch.setattr(run_workdir, "_FICLONE", 0)
    with pytest.raises(run_workdir.WorkdirTooLarge):
        run_workdir.prepare_working_folder(str(own / "runs" / "run"), str(own), [], "", is_pushed=False)


def test_a_copy_of_a_working_folder_knows_its_files_by_another_inode(tmp_path: Path, code: Path) -> None:
    (tmp_path / "run" / "1").mkdir(parents=True)
    run_workdir.prepare_working_folder(str(tmp_path / "run"), str(code), [], "", may_mount=False)
    run_workdir.copy_record(str(tmp_path / "run"), str(tmp_path / "run" / "1"))
    shutil.copytree(tmp_path / "run" / "work", tmp_path / "run" / "1" / "work", symlinks=True)
    (tmp_path / "run" / "1" / "work" / "new").write_text("new")
    assert {path for path, _, _ in run_workdir.list_written_files(str(tmp_path / "run" / "1"), [])} == {"new"}
