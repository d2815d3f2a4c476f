"""Why a file is not pushed, with the rule and its place; and which of these a program has missed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtctl.launch.files import exclusion_reason
from dtctl.launch.files.excluded_files import list_not_sent
from dtctl.launch.files.missing import find_left_out_files
from dtctl.launch.files.push_selection import TreeWalk
from dtctl.launch.files.tree import scan_push_tree
from dtctl.spec.load import parse_spec


def make(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def why(root: Path, path: str, **rules: list[str]) -> str:
    return exclusion_reason.find_exclusion_reason(os.fsencode(root.resolve()), path.encode(), **rules)


def test_the_rule_and_its_line_are_named(tmp_path: Path) -> None:
    root = make(tmp_path, **{".gitignore": "# data\n*.bin\n!keep.bin\nout/\n", "data/.gitignore": "\n*.csv\n"})
    make(root, **{".dtctlignore": "big.txt\n"})
    assert why(root, "data/train.bin") == ".gitignore:2 (*.bin)"
    assert why(root, "data/keep.bin") == ""
    assert why(root, "out/x/y.pt") == ".gitignore:4 (out/)"
    assert why(root, "out/") == ".gitignore:4 (out/)"
    assert why(root, "data/a.csv") == "data/.gitignore:2 (*.csv)"
    assert why(root, "a.csv") == ""
    assert why(root, "sub/big.txt") == ".dtctlignore:1 (big.txt)"
    assert "job.files.exclude" in why(root, "a.py", exclude=["*.py"])
    assert why(root, "data/train.bin", include=["data/*.bin"]) == ""
    assert "secret" in why(root, ".env")
    assert "never pushed" in why(root, ".git/config")


def test_rules_of_the_checkout_around_count(tmp_path: Path) -> None:
    make(tmp_path, **{".gitignore": "*.pt\n", ".git/HEAD": "", ".git/info/exclude": "job/notes\n"})
    root = make(tmp_path / "job", **{"train.py": ""})
    assert why(root, "a.pt") == "../.gitignore:1 (*.pt)"
    assert why(root, "notes") == "../.git/info/exclude:1 (job/notes)"
    assert why(root, "train.py") == ""


NAMES = st.sampled_from(["a.bin", "b.txt", "c.py", "sub/a.bin", "sub/deep/b.txt", "out/c.py", "venv/pyvenv.cfg"])
RULES = st.sampled_from(["*.bin", "!a.bin", "sub/", "/b.txt", "deep/*", "!sub/deep/b.txt", "**/c.py", "out", "# x", ""])


@settings(max_examples=60, deadline=None)
@given(names=st.sets(NAMES, min_size=1), rules=st.lists(RULES, max_size=5), own=st.lists(RULES, max_size=2))
def test_a_reason_is_given_for_what_is_left_out_and_for_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], rules: list[str], own: list[str]
) -> None:
    root = make(tmp_path_factory.mktemp("tree"), **dict.fromkeys(names, ""))
    make(root, **{".gitignore": "\n".join(rules), "sub/.dtctlignore": "\n".join(own)})
    walk = TreeWalk(os.fsencode(root.resolve()))
    taken = {os.fsdecode(file.path) for file in walk.run()}
    assert {name for name in names if not why(root, name)} == {name for name in names if name in taken}
    assert all(why(root, path) for path in walk.left_out)


@pytest.mark.parametrize(
    "line",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/home/me/.dtctl/node/code/ab12/data/train.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/home/me/.dtctl/node/runs/r1/work/data/train.bin'",
        "cat: data/train.bin: No such file or directory",
        "OSError: data/train.bin not found.",
        'RuntimeError: unable to open file "./data/train.bin" in read-only mode',
        "FileNotFoundError: Unable to find '/home/me/.dtctl/node/runs/r1/work/data/train.bin'",
    ],
)
def test_a_file_that_was_missed_and_left_out_is_named_with_the_rule(tmp_path: Path, line: str) -> None:
    make(tmp_path, **{".gitignore": "*.bin\n", "data/train.bin": "x", "data/other.txt": ""})
    spec = parse_spec("job: {script: t.py}", source="s", base_dir=tmp_path)
    found = find_left_out_files(["Traceback", line], spec, folders=["/home/me/.dtctl/node/code/ab12", "/runs/r1/work"])
    assert [(file.path, file.rule) for file in found] == [("data/train.bin", ".gitignore:1 (*.bin)")]


@pytest.mark.parametrize(
    ("rule", "missed", "others", "pattern"),
    [
        ("data/", "data/x/0.bin", 2, "data/x/"),
        ("*.bin", "data/x/0.bin", 1, "data/x/"),
        ("0.bin", "data/x/0.bin", 0, "data/x/0.bin"),
        ("data/", "data/x", 0, "data/x/"),
        ("*.bin", "top.bin", 1, "top.bin"),
    ],
)
def test_the_pattern_brings_what_the_program_needs_next(
    tmp_path: Path, rule: str, missed: str, others: int, pattern: str
) -> None:
    files = ["data/x/0.bin", "data/x/1.bin", "data/x/index.txt", "data/y/2.bin", "top.bin", "more.bin"]
    make(tmp_path, **{".gitignore": f"{rule}\n", **dict.fromkeys(files, "x")})
    spec = parse_spec("job: {script: t.py}", source="s", base_dir=tmp_path)
    line = f"FileNotFoundError: [Errno 2] No such file or directory: '{missed}'"
    (found,) = find_left_out_files([line], spec, folders=["/code"])
    assert (found.others, found.include_pattern) == (others, pattern)
    walk = TreeWalk(os.fsencode(tmp_path.resolve()), include=[pattern])
    taken = {os.fsdecode(file.path) for file in walk.run()}
    assert {name for name in files if name.startswith(pattern)} <= taken


@pytest.mark.parametrize(
    "line",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/none.bin'",  # lies nowhere
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/other.txt'",  # was pushed
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'",  # is another
        "FileNotFoundError: [Errno 2] No such file or directory: '../data/train.bin'",
    ],
)
def test_nothing_is_said_of_other_files(tmp_path: Path, line: str) -> None:
    make(tmp_path, **{".gitignore": "*.bin\n", "data/train.bin": "x", "data/other.txt": ""})
    spec = parse_spec("job: {script: t.py}", source="s", base_dir=tmp_path)
    assert find_left_out_files([line], spec, folders=["/code"]) == []


@pytest.mark.parametrize("outputs", ["out", "out/", "./out", "out/**"])
@pytest.mark.parametrize("rule", ["out/", "*.pt", "out/*"])
def test_outputs_do_not_count_as_not_sent_whichever_rule_keeps_them_here(
    tmp_path: Path, outputs: str, rule: str
) -> None:
    root = make(tmp_path, **{"out/a.pt": "x", "out/best/m.pt": "x", "data/a.pt": "x", ".gitignore": f"{rule}\ndata/\n"})
    spec = parse_spec(
        f"cluster: {{transport: local}}\njob: {{script: t.py, outputs: ['{outputs}']}}", source="s", base_dir=root
    )
    tree = scan_push_tree(root, include=(), exclude=())
    assert [each.path.split("/")[0] for each in list_not_sent(spec, tree, most=9)] == ["data"]
