"""Which files are read, as what, and how they are written: encodings, links, FIFOs, files that nobody can read."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from dtctl.lint import engine, formats
from dtctl.lint.engine import lint_paths
from dtctl.lint.fixes import apply_fixes
from dtctl.lint.model import ClusterFacts, Edit, Problem
from dtctl.lint.source import collect_source_files
from tests.command_line import dtctl
from tests.facts import missing

OLD = "import torch\nwith torch.cuda.amp.autocast():\n    pass\n"
NEW = 'import torch\nwith torch.amp.autocast("cuda"):\n    pass\n'
WRONG = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"


def rules_of(path: Path) -> list[tuple[str, int]]:
    return [(one.rule, one.line) for one in lint_paths([path], cluster=ClusterFacts())]


def fixed(path: Path) -> str:
    """Mend a file; why not, if it was not."""
    return apply_fixes(path, lint_paths([path], cluster=ClusterFacts())).refused


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (WRONG.replace("\n", "\r").encode(), 3),
        (("# a\rb = 1\n" + WRONG).encode(), 5),
        (("x = 1\n\f\n" + WRONG).encode(), 5),
        (("# -*- coding: latin-1 -*-\n# é\n" + WRONG).encode("latin-1"), 5),
        (b"\xef\xbb\xbf" + WRONG.encode(), 3),
    ],
    ids=["old Mac", "a lone return in a comment", "form feed", "latin-1", "byte order mark"],
)
def test_what_python_reads_is_read(tmp_path: Path, raw: bytes, line: int) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(raw)
    compile(raw, "a.py", "exec")
    assert rules_of(path) == [("DT011", line)]


def test_a_chain_of_more_branches_than_python_recurses_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "if a == 0:\n    x = 0\n" + "".join(f"elif a == {n}:\n    x = {n}\n" for n in range(1, 1200)) + WRONG
    )
    assert rules_of(path) == [("DT011", 2403)]


@pytest.mark.parametrize("text", ["x = " + "(" * 300, "x = " + "-" * 20_000 + "1", "x = " + "lambda: " * 20_000 + "b"])
def test_what_nobody_can_parse_is_said_and_the_others_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text + " # barrier dist.\n")
    (tmp_path / "b.py").write_text(WRONG)
    got = [(Path(one.path).name, one.rule) for one in lint_paths([tmp_path], cluster=ClusterFacts())]
    assert got == [("a.py", "DT000"), ("b.py", "DT011")]


def test_a_rule_that_breaks_down_is_named_and_the_others_still_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_check: object) -> list[Problem]:
        raise KeyError("oops")

    monkeypatch.setattr(engine, "PYTHON_CHECKS", (broken, *engine.PYTHON_CHECKS))
    (tmp_path / "a.py").write_text(WRONG)
    (tmp_path / "b.py").write_text(WRONG)
    got = lint_paths([tmp_path], cluster=ClusterFacts())
    assert [one.rule for one in got] == ["DT000", "DT011", "DT000", "DT011"]
    assert "broken" in got[0].message


def test_what_is_no_file_is_not_opened_and_links_to_nothing_are_skipped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.py")
    (tmp_path / ".#b.py").symlink_to("someone@host.1234:5678")
    (tmp_path / "b.py").write_text(WRONG)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "tool").write_text("#!/usr/bin/env python3\n" + WRONG)
    (tmp_path / "start").write_text("#!/bin/bash\nexport NCCL_TIMEOUT=3\n")
    assert rules_of(tmp_path) == [("DT011", 3)]
    files, unread = collect_source_files([tmp_path / "a.py", tmp_path / "notes.txt", tmp_path / "tool"])
    assert files == [tmp_path / "tool"]
    assert [path.name for path, _ in unread] == ["a.py", "notes.txt"]
    assert rules_of(tmp_path / "tool") == [("DT011", 4)]
    assert rules_of(tmp_path / "start") == [("DT029", 2)]


def test_a_fix_goes_through_a_link_and_keeps_mode_mark_line_ends_and_encoding(tmp_path: Path) -> None:
    real = tmp_path / "real" / "a.py"
    real.parent.mkdir()
    real.write_bytes(b"\xef\xbb\xbf" + OLD.replace("\n", "\r\n").encode())
    real.chmod(0o750)
    link = tmp_path / "a.py"
    link.symlink_to("real/a.py")
    assert fixed(link) == ""
    assert link.is_symlink()
    assert real.read_bytes() == b"\xef\xbb\xbf" + NEW.replace("\n", "\r\n").encode()
    assert real.stat().st_mode & 0o777 == 0o750
    latin = tmp_path / "b.py"
    latin.write_bytes(("# coding: latin-1\n# é\n" + OLD).encode("latin-1"))
    assert fixed(latin) == ""
    assert latin.read_bytes() == ("# coding: latin-1\n# é\n" + NEW).encode("latin-1")


def test_lines_that_a_fix_adds_end_as_the_others_do(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    text = (
        "from torch.utils.data import DistributedSampler\ns = DistributedSampler(ds)\n"
        "for epoch in range(9):\n    run(s)\n"
    )
    path.write_bytes(text.replace("\n", "\r\n").encode())
    assert fixed(path) == ""
    assert b"    s.set_epoch(epoch)\r\n    run(s)\r\n" in path.read_bytes()
    assert b"\n" not in path.read_bytes().replace(b"\r\n", b"")


def test_a_result_that_is_not_python_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = 1\n")
    problem = Problem(
        rule="DT001", severity="error", path=str(path), line=1, column=1, message="", fix="", end_line=1,
        edits=(Edit((1, 0), (1, 1), "x ="),),
    )  # fmt: skip
    assert "would not be Python" in apply_fixes(path, [problem]).refused
    assert path.read_text() == "x = 1\n"


def test_comments_inside_strings_wave_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('text = """\n# dtctl: ignore-file\n"""\n' + WRONG)
    assert rules_of(path) == [("DT011", 6)]


def test_addresses_in_sarif_are_escaped() -> None:
    problem = Problem(
        rule="DT001", severity="error", path="a b#%é.py", line=1, column=1, message="", fix="", end_line=1
    )
    log = formats.build_sarif_log([problem], "1")
    uri = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == "a%20b%23%25%C3%A9.py"


def test_the_command_says_what_it_does_not_read_and_reads_its_input(tmp_path: Path) -> None:
    def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return dtctl("lint", *arguments, cwd=tmp_path, stdin=text)

    (tmp_path / "old.py").write_text(OLD)
    (tmp_path / "link.py").symlink_to("old.py")
    done = run("--fix", "old.py", "link.py")
    assert (done.returncode, done.stderr.count("fixed"), "not fixed" in done.stderr) == (0, 1, False)
    assert (tmp_path / "old.py").read_text() == NEW
    (tmp_path / "a.ipynb").write_text("{}")
    done = run("a.ipynb")
    assert done.returncode == 0
    assert not missing(done.stderr, "a.ipynb")
    assert "nothing found" not in done.stderr
    done = run("-", "--format", "json", text=WRONG)
    assert done.returncode == 9
    assert [one["path"] for one in json.loads(done.stdout)] == ["-"]
    assert "could not be read" in run("--explain", "DT000").stdout


@pytest.mark.parametrize("name", ["rot13", "hex", "base64", "zlib", "bz2", "undefined", "punycode", "nonsense"])
def test_an_encoding_that_no_program_has_concerns_its_file_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.py").write_text(f"# coding: {name}\nimport b\n")
    (tmp_path / "b.py").write_text("import a\n" + WRONG)
    found = lint_paths([tmp_path / "a.py", tmp_path / "b.py"], cluster=ClusterFacts())
    assert [(one.rule, Path(one.path).name) for one in found] == [("DT000", "a.py"), ("DT011", "b.py")]
    assert lint_paths([tmp_path / "b.py"], cluster=ClusterFacts()) == found[1:]


SHELL = (
    "'", '"', "'\n", "\"'", "`", "$'", "(", "$(", "((", "<<'A'\n", "A='", "A='\n", "\\\n", "a\n", "echo 'a'\n",
    "python",
    "MASTER_PORT=\"\n", "--master-port $((", "cat <<A\nA\n", "#SBATCH --nodes=2\n", "NCCL_X=1\n",
    "MASTER_PORT=$(( 1 + ",
)  # fmt: skip
"""What a pattern, a word or a list might be searched for again from each place of it."""


@pytest.mark.parametrize("piece", SHELL)
def test_a_long_shell_file_takes_time_by_its_length(tmp_path: Path, piece: str) -> None:
    """Four times the length take about four times the time, and not sixteen."""

    def seconds(length: int) -> float:
        path = tmp_path / f"{length}.sh"
        path.write_text("#!/bin/bash\nexport NCCL_DEBUG=INFO\n" + piece * (length // len(piece)))
        began = time.process_time()
        lint_paths([path], cluster=ClusterFacts())
        return time.process_time() - began

    short, long = min(seconds(10_000) for _ in range(3)), seconds(40_000)
    assert long < 8 * short + 0.1, f"{short:.3f} s, then {long:.3f} s"
