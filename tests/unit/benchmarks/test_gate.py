"""The gate for speed: its intervals, and a real repository with a commit that is slower."""

from __future__ import annotations

import importlib
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "print({seconds})"
"""What the measured program takes, as it says itself: a test of the gate isn't one of the machine that runs it."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("gate")
    for name in {"gate", "machine"} - before:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_ratios_decide_nothing(gate: ModuleType, count: int) -> None:
    assert gate.find_interval([1.5] * count) == (-math.inf, math.inf)


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (25, 8)])
def test_the_ranks_are_those_of_the_binomial_distribution(gate: ModuleType, count: int, rank: int) -> None:
    """Ranks as tables of the sign test have them."""
    assert gate.find_interval(range(1, count + 1)) == (rank, count + 1 - rank)


@pytest.mark.parametrize("count", [6, 11, 25])
def test_the_interval_covers_the_median_as_often_as_it_says(gate: ModuleType, count: int) -> None:
    source, median, covered = random.Random(3), math.log(2), 0
    for _ in range(2000):
        low, high = gate.find_interval([source.expovariate(1) for _ in range(count)])
        covered += low <= median <= high
    assert covered / 2000 > 0.935


def test_a_machine_that_slows_down_is_no_slower_commit(gate: ModuleType) -> None:
    drift = iter(1 + 0.05 * i for i in range(100))
    series = gate.Series(base=[next(drift)])
    for _ in range(10):
        series.head.append(next(drift))
        series.base.append(next(drift))
    assert series.verdict == "within"
    assert statistics.median(series.noise) > 1.03, "the noise shows it"


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "within"), (1.1, "slower"), (0.9, "within"), (1.03, "open")])
def test_verdicts(gate: ModuleType, factor: float, verdict: str) -> None:
    source = random.Random(7)
    series = gate.Series(base=[source.gauss(1, 0.005) for _ in range(13)])
    series.head = [factor * source.gauss(1, 0.005) for _ in range(12)]
    assert series.verdict == verdict


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(gate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A project of three commits, of which the last is slower; the gate looks at it instead of this one.

    Checkouts, processes and pairs are real. Only the seconds are told by the program rather than by a clock.
    """
    folder, commits = tmp_path / "project", []
    (folder / "dtctl").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "dtctl" / "__init__.py").write_text("")
    for seconds, text in ((1.0, "first"), (1.0, "second"), (1.1, "third")):
        (folder / "dtctl" / "__main__.py").write_text(PROGRAM.format(seconds=seconds))
        (folder / "note").write_text(text)
        git(folder, "add", ".")
        git(folder, "commit", "-qm", text)
        commits.append(git(folder, "rev-parse", "HEAD"))
    monkeypatch.setattr(gate, "ROOT", folder)
    monkeypatch.setattr("machine.RESULTS", tmp_path / "results")
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    monkeypatch.setattr(gate, "MEASUREMENTS", (gate.Measurement("told", 1, read_told_seconds),))
    return commits


def read_told_seconds(_stage: Any, side: Any, folder: Path) -> dict[str, float]:
    return {"wall_s": float(side.run("-m", "dtctl", cwd=folder).stdout)}


def test_processor_time_and_waiting_are_told_apart(gate: ModuleType, tmp_path: Path) -> None:
    program = "import time; time.sleep(1); end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    done = gate.measure_command([sys.executable, "-c", program], env=None, cwd=tmp_path, limit_s=300)
    assert done.wall_s > 1.5
    assert 0.5 < done.cpu_s < done.wall_s - 0.9


def test_a_slower_commit_is_found(gate: ModuleType, repository: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert gate.run_gate(repository[1], ["told"], 60, busy=True, pairs=8) == 1
    printed = capsys.readouterr().out
    assert "slower than 1.03 times base with 95% confidence: told" in printed
    assert git(gate.ROOT, "worktree", "list").count("\n") == 0, "no checkout is left"


def test_what_this_machine_cannot_measure_is_left_out_with_the_reason(
    gate: ModuleType, repository: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (told,) = gate.MEASUREMENTS
    absent = replace(told, name="absent", find_obstacle=lambda: "it needs sbatch")
    monkeypatch.setattr(gate, "MEASUREMENTS", (told, absent))
    assert gate.run_gate(repository[0], ["told", "absent"], 60, busy=True, pairs=2) == 0
    printed = capsys.readouterr().out
    assert "absent is left out: it needs sbatch" in printed
    assert printed.count("told") == 2, "its row, and that it is not decided"


def test_an_equal_commit_is_not_called_slower_and_results_are_kept(
    gate: ModuleType, repository: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(gate.ROOT, "checkout", "-q", repository[1])
    monkeypatch.setattr(gate, "wait_for_quiet", lambda: None)
    assert gate.run_gate(repository[0], ["told"], 60, busy=False, pairs=8) == 0
    (path,) = (tmp_path / "results").iterdir()
    kept = json.loads(path.read_text())
    assert kept["commits"] == {"base": repository[0], "head": repository[1]}
    assert kept["rows"]["told"]["verdict"] == "within"
    assert len(kept["rows"]["told"]["samples"]["base"]) == kept["rows"]["told"]["pairs"] + 1
    assert {"date", "machine", "versions", "commit"} <= set(kept)


def test_a_trace_shows_the_commit_that_made_it_slower(
    gate: ModuleType, repository: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate.pick_commits(repository[0], 9) == repository
    assert gate.pick_commits(repository[0], 2) == [repository[0], repository[2]]
    gate.run_trace(repository[0], "told", 9, 0)
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line[:1].isalnum()}
    assert [float(rows[commit[:10]][-1]) for commit in repository[1:]] == [1.0, 1.1]


def test_the_base_is_where_the_branch_started(gate: ModuleType, repository: list[str]) -> None:
    assert gate.find_merge_base() == repository[1], "on main, without a remote"
    git(gate.ROOT, "checkout", "-qb", "topic", repository[1])
    git(gate.ROOT, "commit", "-q", "--allow-empty", "-m", "on the branch")
    assert gate.find_merge_base() == repository[1]


def test_only_measurements_that_there_are(gate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gate", "--only", "nothing"])
    with pytest.raises(SystemExit) as ended:
        gate.main()
    assert ended.value.code == 2


def test_no_variable_of_the_surroundings_slows_a_side(
    gate: ModuleType, repository: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    side = gate.Side(repository[0], tmp_path / "tree", tmp_path / "state")
    assert "PYTHONDONTWRITEBYTECODE" not in side.env
