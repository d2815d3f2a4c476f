"""Which files are pushed, and which never are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtctl.launch.files.push_selection import TreeWalk


def make(root: Path, *paths: str, **texts: str) -> None:
    """Empty files, and ignore files with a text: `gitignore="..."`."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    for name, text in texts.items():
        (root / f".{name}").write_text(text)


def taken(root: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> set[str]:
    """Files that are pushed, ignore files aside."""
    found = TreeWalk(os.fsencode(root.resolve()), include, exclude).run()
    return {os.fsdecode(file.path) for file in found if b"ignore" not in file.path}


def withheld(root: Path, include: Sequence[str] = ()) -> set[str]:
    walk = TreeWalk(os.fsencode(root.resolve()), include)
    walk.run()
    return set(walk.withheld)


def test_ignore_files_of_all_levels_count(tmp_path: Path) -> None:
    make(
        tmp_path,
        "a.log",
        "keep.log",
        "sub/b.log",
        "sub/c.tmp",
        "sub/d.py",
        "out/x",
        gitignore="*.log\n!keep.log\nout/\n",
    )
    (tmp_path / "sub" / ".gitignore").write_text("*.tmp\n!b.log\n")
    assert taken(tmp_path) == {"keep.log", "sub/b.log", "sub/d.py"}


def test_dtctlignore_has_the_last_word(tmp_path: Path) -> None:
    make(tmp_path, "a.bin", "b.bin", "sub/c.csv", gitignore="b.bin\n", dtctlignore="*.csv\n!b.bin\n")
    (tmp_path / "sub" / ".gitignore").write_text("!c.csv\n")
    assert taken(tmp_path) == {"a.bin", "b.bin"}


def test_what_is_never_pushed(tmp_path: Path) -> None:
    make(tmp_path, "train.py", ".git/config", ".dtctl/runs/r1/plan.json", "pkg/__pycache__/a.pyc", "env/pyvenv.cfg")
    make(tmp_path, "env/bin/python", "conda/conda-meta/history", "conda/bin/python", "module/.git", "module/m.py")
    assert taken(tmp_path) == taken(tmp_path, include=["*"]) == {"train.py", "module/m.py"}


SECRET_FILES = [".env", ".env.production", ".envrc", "server.pem", "tls.key", "k.p12", "k.pfx", "id_rsa", "id_ed25519"]
SECRET_FILES += ["id_ecdsa_sk", ".netrc", ".pypirc", ".git-credentials", "credentials.json", "Credentials-prod.json"]
SECRET_FOLDERS = [".aws/credentials", ".ssh/config", ".kube/config", ".gnupg/pubring.kbx"]


def test_secrets_are_withheld_and_reported(tmp_path: Path) -> None:
    make(tmp_path, "train.py", "deep/er/.env", *SECRET_FILES, *SECRET_FOLDERS)
    assert taken(tmp_path) == {"train.py"}
    folders = {path.split("/")[0] + "/" for path in SECRET_FOLDERS}
    assert withheld(tmp_path) == {"deep/er/.env", *SECRET_FILES, *folders}


def test_secrets_that_are_ignored_anyway_are_not_worth_a_word(tmp_path: Path) -> None:
    make(tmp_path, ".env", "train.py", gitignore=".env\n")
    assert withheld(tmp_path) == set()


@pytest.mark.parametrize(
    "name", ["environment.yml", "key.py", "pem/a.py", "monkey", "id_rsa.pub", "credentials.py", "keys/a"]
)
def test_what_only_sounds_like_a_secret_is_pushed(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    assert taken(tmp_path) == {name}


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ([], set()),
        (["*"], set()),
        (["**"], set()),
        (["conf/"], set()),
        (["conf/*"], set()),
        (["c*"], set()),
        ([".env"], {"conf/.env"}),
        (["conf/.env"], {"conf/.env"}),
        (["*.pem"], {"conf/a.pem"}),
        ([".aws/"], {"conf/.aws/config", "conf/.aws/b.pem"}),
        ([".aws/config"], set()),
        (["*", "!*.pem"], set()),
    ],
)
def test_a_secret_is_taken_only_by_its_name(tmp_path: Path, include: list[str], expected: set[str]) -> None:
    make(tmp_path, "conf/.env", "conf/a.pem", "conf/.aws/config", "conf/.aws/b.pem")
    assert taken(tmp_path, include) == expected


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        (["data/"], {"data/a.json", "data/b.bin", "data/deep/c.json"}),
        (["data/*.json"], {"data/a.json"}),
        (["/data/deep/c.json"], {"data/deep/c.json"}),
        (["data/**/*.json"], {"data/a.json", "data/deep/c.json"}),
        (["**/deep/c.json"], {"data/deep/c.json"}),
        (["c.json"], {"data/deep/c.json"}),
        (["/c.json"], set()),
        (["d*a/d??p/"], {"data/deep/c.json"}),
        (["data/", "!*.bin"], {"data/a.json", "data/b.bin", "data/deep/c.json"}),
        (["other/"], set()),
    ],
)
def test_include_takes_what_is_ignored(tmp_path: Path, include: list[str], expected: set[str]) -> None:
    make(tmp_path, "train.py", "data/a.json", "data/b.bin", "data/deep/c.json", gitignore="data/\n")
    assert taken(tmp_path, include) == {"train.py", *expected}


def test_exclude_leaves_out_whatever_else_is_said(tmp_path: Path) -> None:
    make(tmp_path, "train.py", "data/a.json", "data/b.bin", "notes.md", gitignore="data/\n!notes.md\n")
    assert taken(tmp_path, include=["data/"], exclude=["*.bin", "notes.md"]) == {"train.py", "data/a.json"}
    assert taken(tmp_path, include=["data/"], exclude=["data/"]) == {"train.py", "notes.md"}


def test_what_cannot_be_pushed_is_reported(tmp_path: Path) -> None:
    make(tmp_path, "train.py")
    os.mkfifo(tmp_path / "pipe")
    walk = TreeWalk(os.fsencode(tmp_path.resolve()))
    assert [file.path for file in walk.run()] == [b"train.py"]
    assert walk.skipped == ["pipe"]


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_an_ignore_file_that_is_no_file_is_none(tmp_path: Path, kind: str) -> None:
    make(tmp_path, "train.py")
    path = tmp_path / ".gitignore"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        (tmp_path / "rules").write_text("*\n")
        path.symlink_to("rules")
    assert "train.py" in taken(tmp_path)


def test_without_a_checkout_folders_above_do_not_count(tmp_path: Path) -> None:
    make(tmp_path, "project/train.py", gitignore="*\n")
    assert taken(tmp_path / "project") == {"train.py"}
    (tmp_path / ".git").mkdir()
    assert taken(tmp_path / "project") == set()


def test_a_deep_tree_is_no_trouble(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(400):
        folder = folder / "d"
        folder.mkdir()
    (folder / "x").touch()
    assert taken(tmp_path) == {"d/" * 400 + "x"}


def test_the_file_that_the_launch_prints_to_is_left_out(tmp_path: Path) -> None:
    """`dtctl launch > launch.log` would find it changed while it is pushed."""
    make(tmp_path, "train.py")
    listing = f"print([f.path for f in TreeWalk({os.fsencode(tmp_path)!r}).run()])"
    code = f"from dtctl.launch.files.push_selection import TreeWalk; {listing}"
    with (tmp_path / "launch.log").open("w") as output:
        subprocess.run([sys.executable, "-c", code], stdout=output, check=True)
    assert (tmp_path / "launch.log").read_text() == "[b'train.py']\n"
