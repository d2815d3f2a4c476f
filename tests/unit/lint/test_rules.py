"""Every rule: its own examples, and at least three more pieces of code that break it and three that do not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from dtctl.lint.rules import load_lint_rules

sys.path.insert(0, str(Path(__file__).parent))
from snippets import found, problems

CASES = Path(__file__).parent / "cases"
_HEAD = re.compile(r"^### (?P<kind>wrong|right)(?: (?P<options>\(.*?\)))?: (?P<title>.*)$", re.MULTILINE)


def cases() -> list[tuple[str, str, str, str, str]]:
    """(rule, kind, title, options, code) of all files in cases/."""
    read = []
    for path in sorted(CASES.glob("DT*.txt")):
        text = path.read_text(encoding="utf-8")
        heads = list(_HEAD.finditer(text))
        for head, end in zip(heads, [*(one.start() for one in heads[1:]), len(text)], strict=True):
            read.append((path.stem, head["kind"], head["title"], head["options"] or "", text[head.end() + 1 : end]))
    return read


def options(text: str) -> dict[str, object]:
    """`(nodes=2, bare, name=run.sh)`."""
    given: dict[str, object] = {}
    for one in text.strip("()").split(","):
        name, _, value = one.strip().partition("=")
        if name:
            given[name] = int(value) if value.isdigit() else value or True
    return given


def test_the_rules_are_in_order_and_numbers_of_those_that_went_are_not_used_again() -> None:
    rules = list(load_lint_rules())
    assert rules == sorted(set(rules))
    gone = {"DT006", "DT019", "DT034", "DT051", "DT064", "DT065", "DT072", "DT073", "DT074", "DT076"}
    assert not gone & set(rules)


@pytest.mark.parametrize("rule", load_lint_rules().values(), ids=lambda rule: rule.id)
def test_the_wrong_example_breaks_the_rule_and_the_right_one_breaks_none_that_matters(rule) -> None:
    name = "job.sbatch" if "#SBATCH" in rule.wrong else "train.py"
    assert rule.id in found(rule.wrong, name=name)
    assert rule.id not in found(rule.right, name=name)
    assert rule.source.startswith("https://")
    assert len(rule.why.split()) > 10


@pytest.mark.parametrize(("rule", "kind", "title", "given", "code"), cases(), ids=lambda value: str(value)[:60])
def test_cases(rule: str, kind: str, title: str, given: str, code: str) -> None:
    assert (rule in found(code, **options(given))) == (kind == "wrong")


@pytest.mark.parametrize("rule", load_lint_rules())
def test_every_rule_has_three_cases_of_each_kind(rule: str) -> None:
    kinds = [kind for id_, kind, *_ in cases() if id_ == rule]
    assert kinds.count("wrong") >= 3
    assert kinds.count("right") >= 3


def test_the_meeting_point_of_a_job_that_starts_its_ranks_itself_is_only_worth_knowing() -> None:
    code = 'os.environ["MASTER_ADDR"] = "localhost"\nmp.spawn(main, nprocs=4)\n'
    severities = {nodes: [one.severity for one in problems(code, nodes=nodes)] for nodes in (None, 2)}
    assert severities == {None: ["info", "info"], 2: ["error", "info"]}  # the address, and the number of processes
