"""What .gitignore means, by asking git."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtctl.launch.files.ignore import IgnoreRules, split_ignore_lines
from dtctl.launch.files.push_selection import TreeWalk

GIT = shutil.which("git")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty checkout of git, not touched by the settings of whoever runs the tests."""
    if GIT is None:
        pytest.skip("git is not installed")
    folder = tmp_path_factory.mktemp("checkout")
    patch = pytest.MonkeyPatch()
    for name in ("HOME", "XDG_CONFIG_HOME"):
        patch.setenv(name, str(folder.parent))
    patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    subprocess.run([GIT, "init", "-q", folder], check=True)
    yield folder
    patch.undo()


def seen_by_git(folder: Path) -> list[bytes]:
    """Files that git would add."""
    argv = [GIT or "git", "ls-files", "-z", "--others", "--exclude-standard"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, check=True)
    return sorted(path for path in done.stdout.split(b"\0") if path)


def seen_by_us(folder: Path) -> list[bytes]:
    return [file.path for file in TreeWalk(os.fsencode(folder.resolve())).run()]


def fill(folder: Path, files: dict[bytes, bytes]) -> None:
    """Replace all files of a checkout."""
    for entry in folder.iterdir():
        if entry.name != ".git":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for path, text in files.items():
        full = folder / os.fsdecode(path)
        if full.is_dir():
            continue
        try:
            full.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            continue  # a file of that name has come first
        full.write_bytes(text)


LETTERS = [b"a", b"b", b"c", b"A", b"-", b".", b" ", b"!", b"#", b"\\", b"[", b"]", b"*", "é".encode(), b"\xff", b"\n"]
names = (
    st.lists(st.sampled_from(LETTERS), min_size=1, max_size=3).map(b"".join).filter(lambda n: n not in (b".", b".."))
)
paths = st.lists(names, min_size=1, max_size=3).map(b"/".join)
signs = [
    *LETTERS[:-1],
    b"*",
    b"*",
    b"**",
    b"/",
    b"/",
    b"?",
    b"[ab]",
    b"[!a]",
    b"[^b]",
    b"[a-c]",
    b"[[:alpha:]]",
    b"[]a]",
]
signs += [
    b"[!]a-]",
    b"[\\]]",
    b"[c-a]",
    b"[[:upper:]b]",
    b"[[:nosuch:]]",
    b"[[:a]",
    b"**/",
    b"/**",
    b"\\a",
    b"\\*",
    b"\\ ",
]
lines = st.tuples(st.sampled_from([b"", b"", b"", b"!", b"/", b"#"]), st.lists(st.sampled_from(signs), max_size=5)).map(
    lambda parts: parts[0] + b"".join(parts[1])
)
ignore_files = st.lists(lines, max_size=5).map(b"\n".join)


@settings(max_examples=150, deadline=None)
@given(
    files=st.lists(paths, min_size=1, max_size=10),
    rules=st.dictionaries(st.sampled_from([b"", b"a/", b"b/", b"a/b/"]), ignore_files, min_size=1, max_size=3),
)
@example(files=[b"a/x", b"a/keep"], rules={b"": b"a/*\n!a/keep"})
@example(files=[b"a/b/x", b"a/x"], rules={b"": b"a/**\n!a/b"})
@example(files=[b"a", b"b/a"], rules={b"": b"a/\n"})
@example(files=[b"a/b/c", b"a/c"], rules={b"": b"a/**/c\n", b"a/": b"!c"})
@example(files=[b"a", b"ab/c", b"abc"], rules={b"": b"a**/**"})
@example(files=[b"a", b"b"], rules={b"": b"\xef\xbb\xbfa\r\nb"})
def test_the_same_files_as_git(checkout: Path, files: list[bytes], rules: dict[bytes, bytes]) -> None:
    fill(checkout, {**{prefix + b".gitignore": text for prefix, text in rules.items()}, **dict.fromkeys(files, b"")})
    assert seen_by_us(checkout) == seen_by_git(checkout)


def test_rules_of_the_checkout_around_the_folder_count(checkout: Path) -> None:
    fill(checkout, {b".gitignore": b"*.ckpt\n/exp/deep/out\n", b"exp/.gitignore": b"!keep.ckpt\n"})
    folder = checkout / "exp" / "deep"
    fill(
        folder.parent, {b".gitignore": b"!keep.ckpt\n", b"deep/a.ckpt": b"", b"deep/keep.ckpt": b"", b"deep/out/x": b""}
    )
    (checkout / ".git" / "info" / "exclude").write_text("*.swp\n")
    (folder / "train.py").touch()
    (folder / "train.py.swp").touch()
    assert seen_by_us(folder) == [b"keep.ckpt", b"train.py"] == seen_by_git(folder)


def test_a_pattern_may_be_anything_and_never_fails() -> None:
    @settings(max_examples=300)
    @given(st.lists(st.binary(max_size=12), max_size=5), st.binary(min_size=1, max_size=8))
    def check(patterns: list[bytes], name: bytes) -> None:
        assert IgnoreRules(patterns).verdict(b"", name) in (True, False, None)

    check()


def test_lines_are_split_as_git_splits_them() -> None:
    assert split_ignore_lines(b"\xef\xbb\xbfa\r\n\nb \n") == [b"a", b"", b"b ", b""]
