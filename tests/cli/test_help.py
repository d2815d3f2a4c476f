"""The help: groups, one-line texts that fit, examples that work, and what Tab offers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dtctl.cli.app import COMMANDS, EXAMPLES, GROUPS, SECTIONS
from dtctl.launch.records.events import RunPlanned
from dtctl.launch.records.record import RunInfo
from dtctl.launch.records.run_writer import RunWriter
from tests.command_line import dtctl


def test_every_command_is_in_a_group_and_its_line_fits(tmp_path: Path) -> None:
    lines = dtctl("--help", cwd=tmp_path, env={"COLUMNS": "80"}).stdout.splitlines()
    for title, helps in SECTIONS.items():
        assert f"{title}:" in lines
        for name, text in helps.items():
            assert any(re.fullmatch(rf"  {name} +{re.escape(text)}", line) for line in lines), name
    assert max(map(len, lines)) <= 80
    assert {*COMMANDS, *GROUPS} == {name for helps in SECTIONS.values() for name in helps}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_have_options_that_exist(tmp_path: Path, name: str) -> None:
    text = dtctl(name, "-h", cwd=tmp_path).stdout
    for example in EXAMPLES[name]:
        assert f"    {example}" in text.splitlines()
        words = shlex.split(example)
        assert words[:2] == ["dtctl", name]
        own = words[: words.index("--")] if "--" in words else words
        described = text.partition("Examples:")[0]
        assert [word for word in own if re.match(r"--?[a-z]", word) and word not in described] == []


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number, name in enumerate(("gpt-1", "gpt-2", "bert-1")):
        info = RunInfo(
            run=name, token="t", pid=1, started=1e9 + number, spec="", command=["dtctl"], detached=False
        )  # fmt: skip
        RunWriter.create(tmp_path, info).append_event(RunPlanned(nodes=("node1", "node2", "gpu1")))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("dtctl status ", ["bert-1", "gpt-2", "gpt-1"]),
        ("dtctl logs gpt", ["gpt-2", "gpt-1"]),
        ("dtctl logs gpt-1 --node no", ["node1", "node2"]),
        ("dtctl exec gpt-1 g", ["gpu1"]),
        ("dtctl stop x", []),
    ],
)
def test_names_are_completed(runs: Path, line: str, offered: list[str]) -> None:
    words = line.split(" ")
    env = {"_DTCTL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    assert dtctl(cwd=runs, env=env).stdout.split() == offered
